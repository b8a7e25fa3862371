"""Gradients of weights, added where they will be read: in the weight's own `.grad`.

Autograd gives each use of a weight a gradient of its own and adds it to those of earlier
micro-batches. Inside `accumulated_in_place` the kernels that know how do that sum themselves, with
no second tensor, and return None to autograd. Only `torch.autograd.backward` may run inside it:
`torch.autograd.grad` would get nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_in_place = False


@contextmanager
def accumulated_in_place() -> Iterator[None]:
    """Backward passes inside the block add to `.grad` of fp32 weights directly."""
    global _in_place
    before, _in_place = _in_place, True
    try:
        yield
    finally:
        _in_place = before


def deliver(
    weight: Tensor, make: Callable[[], Tensor], add_to: Callable[[Tensor], object]
) -> Tensor | None:
    """What a backward pass returns for `weight`: `make()`, its gradient in fp32; or None, the
    gradient being in `weight.grad`, where `add_to(weight.grad)` adds it to what is there.
    """
    if not (_in_place and weight.is_leaf and weight.dtype == torch.float32):
        return make().to(weight.dtype)
    if weight.grad is None:
        weight.grad = make()
    else:
        add_to(weight.grad)
    return None
