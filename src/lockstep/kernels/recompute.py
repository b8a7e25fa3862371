"""Activations that are cheaper to compute again in the backward pass than to keep.

A norm or a gated activation costs a hundredth of the product that reads it, and its output is kept
for that product's weight gradient alone. An op whose output is such a thing says so with
`can_recompute`; the op that would save it saves with `save` and reads with `load`. Recomputing runs
the same kernel on the same numbers, so no bit depends on it. Whole layers are recomputed by
`Llama.activation_checkpointing` instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_RECIPE = "lockstep_recipe"


def can_recompute(y: Tensor, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Note on `y` that it is `function(*inputs)`, which its own op keeps for its backward."""
    if torch.is_grad_enabled() and y.requires_grad:
        setattr(y, _RECIPE, (function, inputs))
    return y


def save(ctx: Any, activation: Tensor, *others: Tensor) -> None:
    """`ctx.save_for_backward`, where what `activation` is made of stands in for it."""
    function, inputs = getattr(activation, _RECIPE, (None, ()))
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    ctx.recipe = None if function is None else (function, _without_tensors(inputs))
    ctx.num_others = len(others)
    ctx.save_for_backward(*others, *([activation] if function is None else tensors))


def load(ctx: Any) -> tuple[Tensor, ...]:
    """The tensors given to `save`, in its order."""
    saved = ctx.saved_tensors  # activation checkpointing lets it be read once
    others, rest = saved[: ctx.num_others], saved[ctx.num_others :]
    if ctx.recipe is None:
        return *rest, *others
    function, inputs = ctx.recipe
    tensors = iter(rest)
    with torch.no_grad():
        return function(*(next(tensors) if value is None else value for value in inputs)), *others


def _without_tensors(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """None in the place of every tensor: the graph holds those, checks and frees them."""
    return tuple(None if isinstance(value, Tensor) else value for value in inputs)
