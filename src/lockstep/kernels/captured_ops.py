"""The few torch ops that a captured step may contain: each is recorded as a kernel of ours with the
same bits.

A sum of two tensors, tensors laid side by side, and a contiguous copy are what plain model code
does between kernels (residuals, an adapter beside a projection, heads taken out of a row). A form
of these that is not understood gives None, and the step is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.native_library import DTYPE_CODE, native

Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Gives uninitialised contiguous memory for the result."""


def recorded_as_kernel(
    func: Any, args: tuple[Any, ...], kwargs: Any, empty: Empty
) -> Tensor | None:
    """The result of a torch op, computed by kernel calls; None if there are none for it."""
    name = str(func)
    if name == "aten.add.Tensor" and not kwargs and len(args) == 2:
        return _add(args[0], args[1], empty)
    if name == "aten.cat.default" and not kwargs:
        return _cat(args[0], args[1] if len(args) > 1 else 0, empty)
    if name == "aten.clone.default":
        is_contiguous = (kwargs or {}).get("memory_format") in (None, torch.contiguous_format)
        return _clone(args[0], empty) if is_contiguous else None
    return None


def _add(a: Any, b: Any, empty: Empty) -> Tensor | None:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a.shape != b.shape:
        return None
    if a.dtype != b.dtype or a.dtype not in DTYPE_CODE:
        return None
    if not (a.is_contiguous() and b.is_contiguous()):
        return None
    y = empty(tuple(a.shape), a.dtype)
    native().ls_add(y.data_ptr(), a.data_ptr(), b.data_ptr(), DTYPE_CODE[a.dtype], a.numel())
    return y


def _cat(tensors: Sequence[Tensor], dim: int, empty: Empty) -> Tensor | None:
    """Matrices side by side."""
    rows, dtype = tensors[0].shape[0], tensors[0].dtype
    if dim not in (1, -1) or any(x.dim() != 2 or x.dtype != dtype for x in tensors):
        return None
    y = empty((rows, sum(x.shape[1] for x in tensors)), dtype)
    column = 0
    for x in tensors:
        if not _copy_rows(y[:, column : column + x.shape[1]], x):
            return None
        column += x.shape[1]
    return y


def _clone(x: Tensor, empty: Empty) -> Tensor | None:
    """Rows of any shape, each contiguous in itself."""
    y = empty(tuple(x.shape), x.dtype)
    return y if _copy_rows(y, x) else None


def _copy_rows(target: Tensor, source: Tensor) -> bool:
    if source.dim() < 2 or not source[:1].is_contiguous():
        return False
    size = source.dtype.itemsize
    native().ls_copy_rows(
        target.data_ptr(),
        source.data_ptr(),
        source.shape[0],
        source[:1].numel() * size,
        target.stride(0) * size,
        source.stride(0) * size,
    )
    return True
