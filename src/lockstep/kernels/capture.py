"""Captured steps: a sequence of kernel calls recorded once and made again in one native call.

`record(function)` runs a function and writes down the calls it makes to native kernels, with their
arguments; `Program.replay()` makes them again, without Python in between. What a CUDA graph is to a
GPU, and with the same rules: between two replays the inputs change in place, never their addresses,
and the function may do nothing but call kernels, make views, and ask for uninitialised memory. The
few torch ops of `captured_ops` are recorded as kernels, and a parameter converted to another dtype
is a constant of the program. Anything else would happen once and not again, so it is refused with a
CaptureError that names it.

Memory asked for while recording comes from an `Arena`. A piece goes back when the last tensor on
it dies, so a program reuses memory exactly where Python would have. Programs that never run at the
same time share one arena: it is as large as the largest needs. Every other tensor whose address a
call was given (weights, caches, inputs) is kept alive by the program. Nothing here knows of models:
when a program has become worthless (other weights) is for its owner to say.
"""

from __future__ import annotations

import bisect
import ctypes
import struct
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.kernels import dispatch, huge_pages
from lockstep.kernels.captured_ops import recorded_as_kernel
from lockstep.kernels.native_library import missing_reason, native, observed_kernels

_ALIGNMENT_BYTES = 64
_MASK = (1 << 64) - 1
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

Outputs = TypeVar("Outputs")


class CaptureError(RuntimeError):
    """The function cannot be captured; the message says which of its deeds stands in the way."""


class Arena:
    """Address space that programs share; the operating system gives a page memory when it is first
    written.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._memory = huge_pages.empty((capacity_bytes,), torch.uint8)
        self._bytes: np.ndarray[Any, np.dtype[np.uint8]] = self._memory.numpy()
        self._live: list[tuple[int, int]] = []  # (begin, end), ascending
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

    def _place(self, num_bytes: int) -> tuple[int, int]:
        size = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
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
        piece = (begin, begin + size)
        bisect.insort(self._live, piece)
        self.peak_bytes = max(self.peak_bytes, begin + size)
        return piece

    def _release(self, begin: int, end: int) -> None:
        self._live.remove((begin, end))


class Program:
    """A recorded sequence of kernel calls."""

    def __init__(self, calls: _Calls, needs: list[Tensor]) -> None:
        self._slots = np.array(calls.slots, dtype=np.uint64)
        self._address = self._slots.ctypes.data
        self._needs = needs  # only to keep them
        self.num_calls = calls.count
        self._replay = native().ls_replay

    @property
    def num_bytes(self) -> int:
        return int(self._slots.nbytes)

    def replay(self) -> None:
        """Make the calls again, on what their inputs hold now."""
        num_made = self._replay(self._address, self.num_calls)
        assert num_made == self.num_calls, f"call {num_made} of the program names no kernel"


def record(function: Callable[[], Outputs], arena: Arena) -> tuple[Program, Outputs]:
    """Run `function` once and record it; its outputs are a pytree of tensors.

    A replay writes the outputs in place. They lie in the arena, so they hold until anything else is
    recorded or replayed there. Raises CaptureError, and then the function may have run in part.
    """
    if (reason := missing_reason()) or dispatch.is_reference_forced():
        raise CaptureError(
            f"there are no native kernels to record ({reason or 'reference forced'})"
        )
    num_live = arena.num_live
    calls, addressed = _Calls(), _Addressed(arena)
    with torch.no_grad(), observed_kernels(calls.add), addressed, _OnlyKernels(arena):
        outputs = function()
    lasting: Outputs = pytree.tree_map_only(Tensor, arena.lasting, outputs)
    del outputs
    if arena.num_live > num_live:
        raise CaptureError(
            f"{arena.num_live - num_live} tensors made within a captured step outlive it without "
            "being among its outputs; something keeps them, and every replay would change them"
        )
    return Program(calls, list(addressed.tensors.values())), lasting


class _Calls:
    """Kernel calls as the slots `ls_replay` reads: number, then arguments."""

    def __init__(self) -> None:
        self.slots: list[int] = []
        self.count = 0

    def add(self, name: str, types: list[Any], args: tuple[Any, ...]) -> None:
        if name.startswith("pack"):  # whatever the format
            raise CaptureError("a weight was packed within the step; pack it before, once")
        self.slots.append(native().ls_kernel_number(name.encode()))
        self.slots += (_slot(kind, value) for kind, value in zip(types, args, strict=True))
        self.count += 1


def _slot(kind: Any, value: Any) -> int:
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("<f", value), "little")
    return 0 if value is None else int(value) & _MASK


class _Addressed(TorchFunctionMode):
    """Collects tensors whose address was asked for, but those in the arena, which come and go."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self.tensors: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.data_ptr and not self._arena.holds(args[0]):
            self.tensors[result] = args[0]
        return result


class _OnlyKernels(TorchDispatchMode):
    """Serves uninitialised memory from the arena, lets views pass, refuses every other torch op."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self._arena = arena
        self._constants: dict[int, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler (3 s, 100 MB) to keep it away from what follows."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.is_view or func is torch.ops.aten._unsafe_view.default:
            return func(*args, **(kwargs or {}))
        if func.namespace == "aten" and func.overloadpacket.__name__ in _EMPTY:
            like = func(*args, **(kwargs or {}))  # never touched, hence nearly free
            return self._arena.empty_strided(tuple(like.shape), like.stride(), like.dtype)
        if func is torch.ops.aten._to_copy.default and self._is_constant(args[0]):
            converted: Tensor = func(*args, **(kwargs or {}))
            self._constants[id(converted)] = converted
            return converted
        result = recorded_as_kernel(func, args, kwargs, self._arena.empty)
        if result is None:
            raise CaptureError(
                "a captured step may only call Lockstep's kernels, make views and ask for empty "
                f"memory, but {func} was called"
            )
        return result

    def _is_constant(self, tensor: Tensor) -> bool:
        """A parameter or what became of one: it stays as long as weights, and programs, do."""
        return isinstance(tensor, torch.nn.Parameter) or id(tensor) in self._constants
