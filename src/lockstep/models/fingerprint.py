"""Notices that a model no longer computes what it did: weights written to, modules or parameters
replaced, adapters switched, rope tables grown.

A captured step has the addresses of packed weights in it. A trainer in the same process changes
weights without telling, so whoever replays asks here first. Costs some 30 us for 270 parameters.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from lockstep.models.layers import num_weights_set
from lockstep.models.llama import Llama
from lockstep.models.lora import LoraLinear

_version_of = attrgetter("_version")
_is_enabled = attrgetter("enabled")
_num_registered = 0
_is_watching = False


class ModelFingerprint:
    """Remembers what a model was when last asked."""

    def __init__(self, model: Llama) -> None:
        _watch_registrations()
        self._model = model
        self._list()
        self._state = self._current()

    def has_changed(self) -> bool:
        """Whether anything is other than at the last call (or at the beginning)."""
        current = self._current()
        if current == self._state:
            return False
        self._list()
        self._state = self._current()
        return True

    def _list(self) -> None:
        self._tensors = [*self._model.parameters(), *self._model.buffers()]
        self._adapters = [m for m in self._model.modules() if isinstance(m, LoraLinear)]

    def _current(self) -> tuple[object, ...]:
        return (
            _num_registered,
            num_weights_set(),
            self._model.rotary.num_positions,
            list(map(_version_of, self._tensors)),
            list(map(Tensor.data_ptr, self._tensors)),
            list(map(_is_enabled, self._adapters)),
        )


def _watch_registrations() -> None:
    """Count the modules and parameters that are set anywhere in the process, from now on: a counter
    tells of a replaced module without walking the model at every step.
    """
    global _is_watching
    if not _is_watching:
        _is_watching = True
        module_hooks.register_module_module_registration_hook(_count)
        module_hooks.register_module_parameter_registration_hook(_count)


def _count(module: nn.Module, name: str, value: Any) -> None:
    global _num_registered
    _num_registered += 1
