"""Memory for what is read whole at every step: packed weights and KV pages, on 2 MiB pages.

Reading weights from memory at one row is bound by the prefetcher, which stops at page borders: on
4 KiB pages 21 GB/s, on 2 MiB pages 31 (2 cores Zen 4, cold, bf16). Linux gives huge pages to memory
that asks for them (`madvise`), aligned to 2 MiB, so small tensors are cut out of larger chunks. A
chunk is freed when the last tensor in it is.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lockstep.kernels import native_library

_CHUNK_BYTES = 32 << 20
_ALIGNMENT_BYTES = 64
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_lock = threading.Lock()
_chunk: Tensor | None = None
_used_bytes = 0


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor like `torch.empty`, in advised memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = _advised(num_bytes) if num_bytes > _CHUNK_BYTES // 4 else _cut(num_bytes)
    return memory.view(dtype).view(*shape)


def state(setting: Path = _SETTING) -> str:
    """Whether memory that asks for huge pages gets them, in words."""
    if not setting.is_file():
        return "not offered by this system: weights and KV pages lie on ordinary pages"
    mode = setting.read_text().partition("[")[2].partition("]")[0]
    if mode in ("always", "madvise"):
        return f"used for weights and KV pages (transparent huge pages: {mode})"
    return f"switched off: {setting} says {mode}; write madvise to it for faster decoding"


def trim_heap() -> None:
    """Give memory that was freed back to the system, where the C library can: glibc keeps pieces of
    up to 32 MB, and what loading left of a model's float weights was 400 MB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _cut(num_bytes: int) -> Tensor:
    global _chunk, _used_bytes
    padded = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    with _lock:
        if _chunk is None or _used_bytes + padded > _CHUNK_BYTES:
            _chunk, _used_bytes = _advised(_CHUNK_BYTES), 0
        piece = _chunk[_used_bytes : _used_bytes + num_bytes]
        _used_bytes += padded
    return piece


def _advised(num_bytes: int) -> Tensor:
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    if native_library.missing_reason() is None:
        native_library.native().ls_advise_huge_pages(memory.data_ptr(), num_bytes)
    return memory
