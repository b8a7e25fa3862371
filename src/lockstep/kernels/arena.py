"""Memory for the intermediate results of captured steps."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels import huge_pages

_ALIGNMENT_BYTES = 64

Piece = tuple[int, int]
"""Begin and end, in bytes."""


class CaptureError(RuntimeError):
    """The function cannot be captured; the message says which of its deeds stands in the way."""


class Arena:
    """Address space that programs share; the operating system gives a page memory when it is first
    written.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._memory = huge_pages.empty((capacity_bytes,), torch.uint8)
        self._bytes: np.ndarray[Any, np.dtype[np.uint8]] = self._memory.numpy()
        self._live: list[Piece] = []  # ascending
        self._placed: list[Piece] | None = None
        self._followed: Iterator[Piece] | None = None
        self.peak_bytes = 0
        """The most that was in use at one time, by any program."""

    @property
    def capacity_bytes(self) -> int:
        return len(self._bytes)

    @property
    def num_live(self) -> int:
        """Pieces that a tensor still lies on."""
        return len(self._live)

    def empty_strided(
        self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """A tensor in the lowest place that is free; it is free again when the tensor has died."""
        count = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 in size:
            return torch.empty_strided(size, stride, dtype=dtype)
        begin, end = self._place(count * dtype.itemsize)
        owner = self._bytes[begin : begin + count * dtype.itemsize]
        weakref.finalize(owner, self._release, begin, end).atexit = False
        return torch.frombuffer(owner, dtype=dtype).as_strided(size, stride)

    def empty(self, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.empty_strided(size, torch.empty(size, dtype=dtype).stride(), dtype)

    def holds(self, tensor: Tensor) -> bool:
        return 0 <= self._offset(tensor) < self.capacity_bytes

    def lasting(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor that keeps the arena alive but claims no piece of it."""
        if not self.holds(tensor):
            return tensor
        offset = self._offset(tensor)
        base = self._memory[offset : offset + tensor.dtype.itemsize].view(tensor.dtype)
        return base.as_strided(tensor.shape, tensor.stride(), base.storage_offset())

    def _offset(self, tensor: Tensor) -> int:
        return tensor.data_ptr() - self._memory.data_ptr()

    def fill_free(self, byte: int) -> None:
        """Overwrite what no tensor claims, as far as it was ever used: for tests."""
        begin = 0
        for live_begin, live_end in [*self._live, (self.peak_bytes, self.peak_bytes)]:
            self._bytes[begin:live_begin] = byte
            begin = live_end

    @contextmanager
    def remembering(self) -> Iterator[list[Piece]]:
        """The pieces handed out in the block, in order."""
        self._placed = []
        try:
            yield self._placed
        finally:
            self._placed = None

    @contextmanager
    def following(self, pieces: Sequence[Piece]) -> Iterator[None]:
        """In the block, hand out the pieces of an earlier time: what is asked for is the same but
        for smaller sizes.
        """
        self._followed = iter(pieces)
        try:
            yield
        finally:
            self._followed = None

    def _place(self, num_bytes: int) -> Piece:
        size = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        piece = self._lowest(size) if self._followed is None else next(self._followed, (0, 0))
        if piece[1] - piece[0] < size:
            raise CaptureError("a captured step asks for memory in an order that its sizes change")
        bisect.insort(self._live, piece)
        self.peak_bytes = max(self.peak_bytes, piece[1])
        if self._placed is not None:
            self._placed.append(piece)
        return piece

    def _lowest(self, size: int) -> Piece:
        begin = 0
        for live_begin, live_end in self._live:
            if live_begin - begin >= size:
                break
            begin = live_end
        if begin + size > self.capacity_bytes:
            raise CaptureError(
                f"a captured step may use {self.capacity_bytes:,} bytes of memory at one time, "
                f"but this one needs at least {begin + size:,}"
            )
        return begin, begin + size

    def _release(self, begin: int, end: int) -> None:
        self._live.remove((begin, end))
