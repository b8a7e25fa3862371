"""Running a model one layer at a time over a fixed set of sequences.

The hidden states between two layers lie in a file that is mapped into memory, so a model needs no
more memory than its largest layer and one sequence's activations, however deep it is.

Legend: S sequences, L tokens of each, D hidden size, T packed tokens, K inputs of a projection.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.core.model_config import ModelConfig
from lockstep.models.attention import PackedAttention
from lockstep.models.layers import Linear, RotaryTable, take_over
from lockstep.models.llama import Layer
from lockstep.models.loading import Checkpoint

Observe = Callable[[str, Tensor], None]
"""Hears the name of a projection within its layer and its input (T, K)."""

PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


class HiddenStates:
    """The activations (S, L, D) that enter the next layer, in a file of their own."""

    def __init__(self, path: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        sequences, length, features = shape
        size = sequences * length * features
        with path.open("wb") as stream:
            # Whole at once: on a full disk a page that is first written to later kills the process.
            os.posix_fallocate(stream.fileno(), 0, size * dtype.itemsize)
        mapped = torch.from_file(str(path), shared=True, size=size, dtype=dtype)
        self.x_SLD = mapped.view(sequences, length, features)

    @classmethod
    def of_tokens(
        cls, path: Path, tokens_SL: Tensor, table_VD: Tensor, dtype: torch.dtype
    ) -> HiddenStates:
        """What the token table makes of the sequences."""
        states = cls(path, (*tokens_SL.shape, table_VD.shape[1]), dtype)
        for index, tokens_L in enumerate(tokens_SL):
            states.x_SLD[index] = table_VD[tokens_L].to(dtype)
        return states

    def __len__(self) -> int:
        return len(self.x_SLD)


class LayerRunner:
    """Runs layers on hidden states, sequence by sequence."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        self._rotary = RotaryTable(config.rope, config.head_dim)
        self._rotary.reserve(length)
        self._positions = torch.arange(length)
        self._attention = PackedAttention.from_lengths([length])

    @torch.no_grad()
    def outputs(self, layer: Layer, states: HiddenStates) -> Iterator[tuple[int, Tensor]]:
        """(sequence, output (L, D)) for every sequence; the states stay as they are."""
        for index, x_LD in enumerate(states.x_SLD):
            yield index, layer(x_LD.clone(), self._positions, self._rotary, self._attention)

    def advance(self, layer: Layer, states: HiddenStates) -> None:
        """Replace the states by what the layer makes of them."""
        for index, y_LD in self.outputs(layer, states):
            states.x_SLD[index] = y_LD

    def observe(self, layer: Layer, states: HiddenStates, observe: Observe) -> None:
        """Run the layer, for what enters its projections alone."""
        with _observed(layer, observe):
            for _ in self.outputs(layer, states):
                pass


def read_layer(checkpoint: Checkpoint, index: int) -> Layer:
    """One layer of a checkpoint in fp32."""
    with torch.device("meta"):
        layer = Layer(checkpoint.config, index)
    for name, _ in list(layer.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        tensor = checkpoint.read(f"model.layers.{index}.{name}").to(torch.float32, copy=True)
        layer.get_submodule(owner).register_parameter(leaf, nn.Parameter(tensor, False))
    return layer


def projection(layer: Layer, name: str) -> Linear:
    module = layer.get_submodule(name)
    assert isinstance(module, Linear), name
    return module


class _ObservedLinear(Linear):
    """A projection that tells what enters it; as an adapted one it is fused with no other."""

    def __init__(self, base: Linear, name: str, observe: Observe) -> None:
        nn.Module.__init__(self)
        take_over(self, base)
        self._name, self._observe = name, observe

    @property
    def is_adapted(self) -> bool:
        return True

    def adapt(self, x_TK: Tensor, y_TN: Tensor) -> Tensor:
        self._observe(self._name, x_TK)
        return y_TN


@contextmanager
def _observed(layer: Layer, observe: Observe) -> Iterator[None]:
    plain = {name: projection(layer, name) for name in PROJECTIONS}
    for name, module in plain.items():
        layer.set_submodule(name, _ObservedLinear(module, name, observe))
    try:
        yield
    finally:
        for name, module in plain.items():
            layer.set_submodule(name, module)
