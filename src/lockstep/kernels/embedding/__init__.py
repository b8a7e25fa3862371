"""Token embedding. V vocabulary, T tokens, D features; the table may be an fp32 master."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import dispatch, gradients
from lockstep.kernels.embedding import cpu, reference
from lockstep.kernels.linear import runs_natively

__all__ = ["embedding"]

_embedding = dispatch.define(
    "embedding(Tensor weight, Tensor tokens, bool bf16) -> Tensor",
    reference=reference.embedding,
    native=cpu.embedding,
    fake=lambda weight, tokens, bf16: weight.new_empty(
        tokens.shape[0], weight.shape[1], dtype=torch.bfloat16 if bf16 else torch.float32
    ),
)
_backward_op = dispatch.define(
    "embedding_backward(Tensor dy, Tensor tokens, int vocab_size) -> Tensor",
    reference=reference.embedding_backward,
    native=cpu.embedding_backward,
    fake=lambda dy, tokens, vocab_size: dy.new_empty(vocab_size, dy.shape[1], dtype=torch.float32),
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, tokens, _bf16 = inputs
    ctx.save_for_backward(tokens)
    ctx.weight = weight if weight.is_leaf else None
    ctx.vocab_size, ctx.dtype = weight.shape[0], weight.dtype


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    (tokens,) = ctx.saved_tensors
    if not ctx.needs_input_grad[0]:
        return None, None, None
    make = functools.partial(_backward_op, dy, tokens, ctx.vocab_size)
    if ctx.weight is None or not runs_natively(dy):
        return make().to(ctx.dtype), None, None
    add_to = functools.partial(cpu.add_backward, dy_TD=dy, tokens_T=tokens)
    return gradients.deliver(ctx.weight, make, add_to), None, None


dispatch.autograd("embedding", backward=_backward, setup_context=_setup_context)


def embedding(weight_VD: Tensor, tokens_T: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Rows of the table for int64 tokens, each within [0, V), rounded to `dtype` (fp32 or bf16)."""
    return _embedding(weight_VD, tokens_T, dtype == torch.bfloat16)
