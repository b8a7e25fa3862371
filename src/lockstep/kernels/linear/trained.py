"""The products of a training step, with what lies between them, as few nodes of autograd.

The forward pass has the bits of the separate ops and of serving. The backward pass is where it
differs: what a norm, a gate or a residual sum does to gradients happens in the product or the row
pass beside it, each sum is rounded once, and weights' gradients go to where they are kept
(`gradients`). Outputs of norms and gates are computed again instead of kept. Legend: T rows, K
inputs, N outputs, F gated features, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels import dispatch, gradients, huge_pages, native_library, workspace
from lockstep.kernels.linear import cpu, packing
from lockstep.kernels.linear.packs import PackCache
from lockstep.kernels.native_library import DTYPE_CODE
from lockstep.kernels.rms_norm import cpu as rms_norm
from lockstep.kernels.scale.cpu import scale_into
from lockstep.kernels.silu_mul import cpu as silu_mul

__all__ = ["Adapter", "Projection", "can_train", "gated_mlp", "products"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Adapter:
    """scaling * B A, added to a weight."""

    a_RK: Tensor
    b_NR: Tensor
    scaling: float
    segments: int
    """Of the sum over K."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Projection:
    """One product: a float weight with what is added to it."""

    weight_NK: Tensor
    bias_N: Tensor | None
    packs: PackCache
    segments: int
    adapter: Adapter | None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What may want a gradient: weight, bias, A and B."""
        adapter = self.adapter
        pair = (None, None) if adapter is None else (adapter.a_RK, adapter.b_NR)
        return self.weight_NK, self.bias_N, *pair


_TENSORS = 4


def can_train(x: Tensor) -> bool:
    """Whether a step with this input may use these nodes."""
    return (
        torch.is_grad_enabled()
        and type(x) is Tensor
        and x.is_cpu
        and x.dtype in DTYPE_CODE
        and not torch.compiler.is_compiling()
        and not dispatch.is_reference_forced()
        and native_library.missing_reason() is None
    )


def products(
    x_TK: Tensor,
    projections: Sequence[Projection],
    packs: PackCache,
    norm_weight_K: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Products of norm(x) side by side, (T, sum of N), and x itself for the residual sum, whose
    gradient is added to the norm's. `packs` holds the weights as one, where none is adapted.
    """
    group = _Group(projections, packs)
    y_TN, alias_TK = _Products.apply(group, eps, x_TK, None, norm_weight_K, *group.tensors)
    return y_TN, alias_TK


def product(x_TK: Tensor, projection: Projection, residual_TN: Tensor) -> Tensor:
    """x W^T + residual."""
    group = _Group([projection], projection.packs)
    return _Products.apply(group, 0.0, x_TK, residual_TN, None, *group.tensors)


def gated_mlp(
    x_TK: Tensor,
    gate: Projection,
    up: Projection,
    down: Projection,
    norm_weight_K: Tensor,
    eps: float,
    *,
    recompute: bool = False,
) -> Tensor:
    """x + down(silu(gate(norm(x))) * up(norm(x))). `recompute`: gate's and up's outputs, half of
    what a layer keeps, are computed again in the backward pass.
    """
    inner, outer = _Group([gate, up], None), _Group([down], down.packs)
    return _GatedMLP.apply(
        inner, outer, eps, recompute, x_TK, norm_weight_K, *inner.tensors, *outer.tensors
    )


class _Group:
    """Products of the same rows."""

    def __init__(self, projections: Sequence[Projection], packs: PackCache | None) -> None:
        self.projections = projections
        self._packs = packs
        self.adapters = [p.adapter for p in projections if p.adapter is not None]
        self.sizes = [p.weight_NK.shape[0] for p in projections]

    @property
    def tensors(self) -> list[Tensor | None]:
        return [tensor for projection in self.projections for tensor in projection.tensors]

    def forward(
        self,
        x_TK: Tensor,
        *,
        places: Sequence[Tensor] | None = None,
        residual_TN: Tensor | None = None,
        norm_weight_K: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Outputs side by side, or in `places`, and the adapters' scaled hidden rows (T, sum R).

        `norm_weight_K` only names the packs that serving uses.
        """
        if not self.adapters and places is None:
            assert self._packs is not None
            weights = [p.weight_NK for p in self.projections]
            biases = [p.bias_N for p in self.projections if p.bias_N is not None]
            packed, bias = _packed(self._packs, weights, biases, x_TK.dtype, norm_weight_K)
            return cpu.gemm(
                x_TK,
                packed,
                sum(self.sizes),
                column_bias=bias,
                residual_TN=residual_TN,
                segments=self.projections[0].segments,
            ), None
        whole = None
        if places is None:
            whole = x_TK.new_empty(len(x_TK), sum(self.sizes))
            places = whole.split(self.sizes, 1)
        for projection, place in zip(self.projections, places, strict=True):
            self.write(projection, x_TK, place)
        hidden_TR = self._hidden(x_TK) if self.adapters else None
        for projection, place, part in zip(
            self.projections, places, self._parts(hidden_TR), strict=True
        ):
            if projection.adapter is not None:
                packed_b = cpu.pack_temporary(projection.adapter.b_NR, x_TK.dtype)
                cpu.gemm(part, packed_b, place.shape[1], out=place, residual_TN=place)
        if residual_TN is not None:
            assert whole is not None
            cpu.add_into(whole, residual_TN.contiguous())
        return whole, hidden_TR

    @staticmethod
    def write(projection: Projection, x_TK: Tensor, place_TN: Tensor) -> None:
        """The product without its adapter."""
        biases = [] if projection.bias_N is None else [projection.bias_N]
        packed, bias = _packed(projection.packs, [projection.weight_NK], biases, x_TK.dtype)
        cpu.gemm(
            x_TK,
            packed,
            place_TN.shape[1],
            column_bias=bias,
            segments=projection.segments,
            out=place_TN,
        )

    def hidden_gradient(self, dy_TN: Tensor) -> Tensor | None:
        """Of the adapters' hidden rows, scaling included: (T, sum R)."""
        if not self.adapters:
            return None
        dh_TR = dy_TN.new_empty(len(dy_TN), sum(len(a.a_RK) for a in self.adapters))
        for projection, dy, part in zip(
            self.projections, dy_TN.split(self.sizes, 1), self._parts(dh_TR), strict=True
        ):
            if projection.adapter is not None:
                packed = cpu.pack_temporary(projection.adapter.b_NR.t(), dy.dtype)
                cpu.gemm(dy, packed, part.shape[1], out=part)
        self._scale(dh_TR)
        return dh_TR

    def grad_input(
        self, dy_TN: Tensor, dh_TR: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        """dx (T, K): one product with all weights, and one with all of the adapters' A."""
        dx_TK = _product_with(dy_TN, [p.weight_NK for p in self.projections], out=out)
        if dh_TR is not None:
            _product_with(dh_TR, [a.a_RK for a in self.adapters], out=dx_TK, add=True)
        return dx_TK

    def grad_tensors(
        self,
        needed: Sequence[bool],
        dy_TN: Tensor,
        x_TK: Tensor,
        hidden_TR: Tensor | None,
        dh_TR: Tensor | None,
    ) -> list[Tensor | None]:
        """Of `tensors`, in their order."""
        grads: list[Tensor | None] = []
        for i, (projection, dy, hidden, dh) in enumerate(
            zip(
                self.projections,
                dy_TN.split(self.sizes, 1),
                self._parts(hidden_TR),
                self._parts(dh_TR),
                strict=True,
            )
        ):
            weight, bias, a, b = projection.tensors
            wants = needed[i * _TENSORS : (i + 1) * _TENSORS]
            grads.append(_grad_weight(weight, dy, x_TK) if wants[0] else None)
            grads.append(
                cpu.column_sum(dy).to(bias.dtype) if wants[1] and bias is not None else None
            )
            grads.append(_grad_weight(a, dh, x_TK) if wants[2] else None)
            grads.append(_grad_weight(b, dy, hidden) if wants[3] else None)
        return grads

    def _hidden(self, x_TK: Tensor) -> Tensor:
        sizes = [len(a.a_RK) for a in self.adapters]
        hidden_TR = x_TK.new_empty(len(x_TK), sum(sizes))
        if len({a.segments for a in self.adapters}) == 1:
            packed = _pack_together([a.a_RK for a in self.adapters], x_TK.dtype)
            segments = self.adapters[0].segments
            cpu.gemm(x_TK, packed, sum(sizes), segments=segments, out=hidden_TR)
        else:
            for a, part in zip(self.adapters, hidden_TR.split(sizes, 1), strict=True):
                packed = cpu.pack_temporary(a.a_RK, x_TK.dtype)
                cpu.gemm(x_TK, packed, part.shape[1], segments=a.segments, out=part)
        self._scale(hidden_TR)
        return hidden_TR

    def _scale(self, rows_TR: Tensor) -> None:
        factors = {a.scaling for a in self.adapters}
        assert len(factors) == 1, "adapters of one model have one scaling"
        scale_into(rows_TR, rows_TR, factors.pop())

    def _parts(self, rows_TR: Tensor | None) -> list[Any]:
        """The adapters' columns of (T, sum R), None for what is not adapted."""
        parts: list[Any] = [None] * len(self.projections)
        if rows_TR is not None:
            columns = iter(rows_TR.split([len(a.a_RK) for a in self.adapters], 1))
            parts = [None if p.adapter is None else next(columns) for p in self.projections]
        return parts


class _Products(torch.autograd.Function):
    """(outputs, x) after a norm; outputs + residual without one."""

    @staticmethod
    def forward(
        ctx: Any,
        group: _Group,
        eps: float,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        *tensors: Tensor | None,
    ) -> Any:
        rows = x if norm_weight is None else _normed(x, norm_weight, eps)
        y, hidden = group.forward(rows, residual_TN=residual, norm_weight_K=norm_weight)
        ctx.group, ctx.eps = group, eps
        ctx.save_for_backward(x, norm_weight, hidden)
        return y if norm_weight is None else (y, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor, dalias: Tensor | None = None) -> tuple[Any, ...]:
        x, norm_weight, hidden = ctx.saved_tensors
        group: _Group = ctx.group
        rows = x if norm_weight is None else _normed(x, norm_weight, ctx.eps)
        dh = group.hidden_gradient(dy)
        grads = group.grad_tensors(ctx.needs_input_grad[5:], dy, rows, hidden, dh)
        wants_x, wants_residual, wants_norm = ctx.needs_input_grad[2:5]
        dx = dnorm = None
        if norm_weight is None:
            dx = group.grad_input(dy, dh) if wants_x else None
        elif wants_x or wants_norm:
            drows = group.grad_input(dy, dh, out=rows)
            dx, dnorm = _norm_backward(drows, x, norm_weight, ctx.eps, dalias, wants_norm)
        return None, None, dx, dy if wants_residual else None, dnorm, *grads


class _GatedMLP(torch.autograd.Function):
    """x + down(silu(gate(norm(x))) * up(norm(x)))."""

    @staticmethod
    def forward(
        ctx: Any,
        inner: _Group,
        outer: _Group,
        eps: float,
        recompute: bool,
        x: Tensor,
        norm_weight: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        shape = (len(x), inner.sizes[0])
        make = workspace.take if recompute else _fresh
        gate, up = (make(name, shape, x.dtype) for name in ("gate", "up"))
        _, hidden = inner.forward(_normed(x, norm_weight, eps), places=(gate, up))
        gated = silu_mul.silu_mul(gate, up, out=_scratch("gated", gate))
        y, outer_hidden = outer.forward(gated, residual_TN=x)
        ctx.inner, ctx.outer, ctx.eps = inner, outer, eps
        ctx.recompute = recompute
        kept = (None, None) if recompute else (gate, up)
        ctx.save_for_backward(x, norm_weight, *kept, hidden, outer_hidden)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, norm_weight, gate, up, hidden, outer_hidden = ctx.saved_tensors
        inner, outer = ctx.inner, ctx.outer
        wants_x, wants_norm, *wants = ctx.needs_input_grad[4:]
        dy = dy.contiguous()
        rows = _normed(x, norm_weight, ctx.eps)
        if ctx.recompute:
            # Gradients do not fit into the holes that activations leave: give those back.
            huge_pages.trim_heap()
            shape = (len(x), inner.sizes[0])
            gate, up = (workspace.take(name, shape, x.dtype) for name in ("gate", "up"))
            inner.forward(rows, places=(gate, up))
        dh = outer.hidden_gradient(dy)
        gated = outer.grad_input(dy, dh, out=_scratch("gated", gate))  # its gradient, until below
        dboth = workspace.take("dboth", (len(gate), 2 * gate.shape[1]), gate.dtype)
        silu_mul.write_backward(*dboth.split(inner.sizes, 1), gated, gated, gate, up)
        split = len(inner.tensors)
        outer_grads = outer.grad_tensors(wants[split:], dy, gated, outer_hidden, dh)
        dh = inner.hidden_gradient(dboth)
        grads = inner.grad_tensors(wants[:split], dboth, rows, hidden, dh)
        dx = dnorm = None
        if wants_x or wants_norm:
            drows = inner.grad_input(dboth, dh, out=rows)
            dx, dnorm = _norm_backward(drows, x, norm_weight, ctx.eps, dy, wants_norm)
        return None, None, None, None, dx, dnorm, *grads, *outer_grads


def _norm_backward(
    drows_TK: Tensor,
    x_TK: Tensor,
    weight_K: Tensor,
    eps: float,
    added_TK: Tensor | None,
    wants_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    dw_K = torch.empty(x_TK.shape[1], dtype=torch.float32) if wants_weight else None
    dx_TK = rms_norm.grad_input(drows_TK, x_TK, weight_K, eps, added_TD=added_TK, dw_D=dw_K)
    return dx_TK, None if dw_K is None else dw_K.to(weight_K.dtype)


def _pack_together(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Small ones, side by side, for one product."""
    columns, k = sum(map(len, matrices)), matrices[0].shape[1]
    num_bytes = packing.FLOAT_FORMATS[dtype].num_bytes(columns, k)
    packed = torch.zeros(num_bytes // dtype.itemsize, dtype=dtype)
    first = 0
    for matrix in matrices:
        packing.pack_into(packed, matrix, first_column=first)
        first += len(matrix)
    return packed


def _fresh(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _scratch(name: str, like: Tensor) -> Tensor:
    return workspace.take(name, tuple(like.shape), like.dtype)


def _normed(x_TK: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    return rms_norm.rms_norm(x_TK, weight_K, eps, out=_scratch("rows", x_TK))


def _packed(
    packs: PackCache,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    dtype: torch.dtype,
    norm_weight_K: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Frozen weights from their packs, trained ones packed for this call, with their biases."""
    if not any(weight.requires_grad for weight in weights):
        kept = packs.get(weights, dtype, biases=biases, norm_weight=norm_weight_K)
        return kept.data, kept.bias
    sizes = [len(weight) for weight in weights]
    packed = _room_for_packed(sum(sizes), weights[0].shape[1], dtype)
    if any(size % packing.PANEL for size in sizes[:-1]):
        packed.zero_()
    for weight, first in zip(weights, packing.first_columns(sizes), strict=True):
        packing.pack_into(packed, weight, first_column=first)
    return packed, packing.pack_bias(biases, dtype) if biases else None


def _room_for_packed(columns: int, k: int, dtype: torch.dtype) -> Tensor:
    num_bytes = packing.FLOAT_FORMATS[dtype].num_bytes(columns, k)
    return workspace.take("packed", (num_bytes // dtype.itemsize,), dtype)


def _product_with(
    dy_TN: Tensor, weights: Sequence[Tensor], *, out: Tensor | None, add: bool = False
) -> Tensor:
    """dy [W1; W2; ...], the weights being (N1, K), (N2, K) and so on; added to `out`, if wanted."""
    num_inputs, k = dy_TN.shape[1], weights[0].shape[1]
    packed = _room_for_packed(k, num_inputs, dy_TN.dtype)
    if any(len(weight) % 2 for weight in weights[:-1]):
        weights = [torch.cat([*weights])]
    first = 0
    for weight in weights:
        packing.pack_into(packed, weight.t(), first_input=first, num_inputs=num_inputs)
        first += len(weight)
    return cpu.gemm(dy_TN, packed, k, out=out, residual_TN=out if add else None)


def _grad_weight(weight_NK: Tensor | None, dy_TN: Tensor, x_TK: Tensor) -> Tensor | None:
    assert weight_NK is not None
    return gradients.deliver(
        weight_NK,
        lambda: cpu.linear_grad_weight(dy_TN, x_TK),
        lambda grad: cpu.add_grad_weight(grad, dy_TN, x_TK, accumulate=True),
    )
