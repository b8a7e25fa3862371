"""Memory for what lives within one call, kept between calls.

A training step makes the same temporaries in every layer, between activations that stay. Taken from
the heap they leave holes among those (a fifth of the peak), and fresh pages cost more than many
kernels that fill them. A name is one piece of memory of each thread: whoever takes it again gets
the same memory, so no name may be taken twice by what is in use at one time, and nothing taken may
outlive the call.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor


class _Pieces(threading.local):
    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}


_pieces = _Pieces()


def take(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor in the memory of that name."""
    num_bytes = math.prod(shape) * dtype.itemsize
    piece = _pieces.by_name.get(name)
    if piece is None or len(piece) < num_bytes:
        piece = _pieces.by_name[name] = torch.empty(num_bytes, dtype=torch.uint8)
    return piece[:num_bytes].view(dtype).view(shape)
