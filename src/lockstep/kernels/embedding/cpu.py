"""Native embedding. Its backward splits columns over threads, so each sum runs in token order."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.linear.packs import Packed
from lockstep.kernels.native_library import DTYPE_CODE, is_intercepted, native


def _check(tokens_T: Tensor, vocab_size: int) -> None:
    if not tokens_T.numel() or is_intercepted():
        return
    tokens = tokens_T.numpy()
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= vocab_size:
        raise IndexError(
            f"token id {highest if highest >= vocab_size else lowest} is not in the vocabulary, "
            f"0 to {vocab_size - 1}"
        )


def embedding(weight_VD: Tensor, tokens_T: Tensor, bf16: bool) -> Tensor:
    weight_VD = weight_VD.contiguous()
    v, d = weight_VD.shape
    _check(tokens_T, v)
    y_TD = torch.empty(tokens_T.shape[0], d, dtype=torch.bfloat16 if bf16 else torch.float32)
    native().ls_embedding(
        y_TD.data_ptr(),
        DTYPE_CODE[y_TD.dtype],
        weight_VD.data_ptr(),
        DTYPE_CODE[weight_VD.dtype],
        tokens_T.data_ptr(),
        tokens_T.shape[0],
        d,
    )
    return y_TD


def embedding_quantized(
    packed: Packed, tokens_T: Tensor, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Dequantised rows out of a packed table of that shape (V, D)."""
    assert packed.format.values in ("u8", "u4"), f"no scheme has a table of {packed.format.values}"
    v, d = shape
    _check(tokens_T, v)
    y_TD = torch.empty(tokens_T.shape[0], d, dtype=dtype)
    native().ls_embedding_quantised(
        y_TD.data_ptr(),
        DTYPE_CODE[dtype],
        packed.data.data_ptr(),
        packed.format.code,
        tokens_T.data_ptr(),
        tokens_T.shape[0],
        d,
    )
    return y_TD


def embedding_backward(dy_TD: Tensor, tokens_T: Tensor, vocab_size: int) -> Tensor:
    dw_VD = torch.zeros(vocab_size, dy_TD.shape[1], dtype=torch.float32)
    return add_backward(dw_VD, dy_TD, tokens_T)


def add_backward(dw_VD: Tensor, dy_TD: Tensor, tokens_T: Tensor) -> Tensor:
    """dw += the rows of dy, in the order of tokens."""
    dy_TD = dy_TD.contiguous()
    native().ls_embedding_backward(
        dw_VD.data_ptr(),
        dy_TD.data_ptr(),
        DTYPE_CODE[dy_TD.dtype],
        tokens_T.data_ptr(),
        dy_TD.shape[0],
        dy_TD.shape[1],
    )
    return dw_VD
