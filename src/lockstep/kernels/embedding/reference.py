"""Rows of a table: y[t] = W[token[t]], rounded to the compute dtype. The gradient adds rows in
token order.
"""

from __future__ import annotations

import torch
from torch import Tensor


def embedding(weight_VD: Tensor, tokens_T: Tensor, bf16: bool) -> Tensor:
    return weight_VD[tokens_T].to(torch.bfloat16 if bf16 else torch.float32)


def embedding_backward(dy_TD: Tensor, tokens_T: Tensor, vocab_size: int) -> Tensor:
    dw_VD = torch.zeros(vocab_size, dy_TD.shape[1], dtype=torch.float32)
    return dw_VD.index_add_(0, tokens_T, dy_TD.float())
