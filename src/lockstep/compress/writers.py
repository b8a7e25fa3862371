"""What every writer of a compressed model does, and how a model becomes a folder of them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lockstep.kernels.linear.formats import QuantizedWeight


class WeightWriter(Protocol):
    """Takes a model's tensors by Hugging Face's names, in the order of the layers."""

    def add(self, name: str, value: Tensor | QuantizedWeight) -> None: ...

    def finish(self) -> None:
        """Every tensor was added; what was written becomes a model that can be loaded."""
