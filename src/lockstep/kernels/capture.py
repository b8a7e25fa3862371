"""Captured steps: a sequence of kernel calls recorded once and made again in one native call.

`record(function)` runs a function without computing anything and writes down the calls it would
make to native kernels, with their arguments; `Program.replay()` makes them, without Python in
between. What a CUDA graph is to a GPU, and with the same rules: between two replays the inputs
change in place, never their addresses, and the function may do nothing but call kernels, make
views, and ask for uninitialised memory. The few torch ops of `captured_ops` are recorded as
kernels, and a parameter converted to another dtype is a constant of the program. Anything else
would happen once and not again, so it is refused with a CaptureError that names it.

Beyond CUDA graphs, one program serves all sizes: the function takes numbers (of tokens, of
sequences), is recorded at the largest and at each one less, and every argument that differs is
taken to be linear in them. A further recording at the smallest must come out as predicted.

Memory asked for while recording comes from an `Arena`. A piece goes back when the last tensor on
it dies, so a program reuses memory exactly where Python would have. Programs that never run at the
same time share one arena: it is as large as the largest needs. Every other tensor whose address a
call was given (weights, caches, inputs) is kept alive by the program. Nothing here knows of models:
when a program has become worthless (other weights) is for its owner to say.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from contextlib import ExitStack
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.kernels import dispatch
from lockstep.kernels.arena import Arena, CaptureError
from lockstep.kernels.captured_ops import recorded_as_kernel
from lockstep.kernels.native_library import intercepted_kernels, missing_reason, native

_MASK = (1 << 64) - 1
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

Outputs = TypeVar("Outputs")
Sizes = tuple[int, ...]


class Program:
    """A recorded sequence of kernel calls, for all sizes from the smallest to the largest."""

    def __init__(
        self, calls: _Calls, slopes: list[np.ndarray[Any, Any]], smallest: Sizes, largest: Sizes
    ) -> None:
        self.num_calls = calls.count
        self.names = calls.names
        self.places = calls.places
        self._smallest, self._largest = smallest, largest
        self._needs = list(calls.tensors.values())  # only to keep them
        self._slots = calls.as_array()
        self._address = self._slots.ctypes.data
        self._sizes = largest
        self._varying = np.flatnonzero(np.any(slopes, axis=0)) if slopes else np.array([], np.int64)
        self._slopes = [slope[self._varying] for slope in slopes]
        self._constant = self._slots[self._varying]
        for slope, size in zip(self._slopes, largest, strict=True):
            self._constant -= slope * size
        self._replay = native().ls_replay

    @property
    def num_bytes(self) -> int:
        return int(self._slots.nbytes + self._constant.nbytes * (2 + len(self._slopes)))

    def slots_at(self, sizes: Sizes) -> np.ndarray[Any, Any]:
        """The whole program for some sizes."""
        self._set(sizes)
        return self._slots

    def replay(self, sizes: Sizes = ()) -> None:
        """Make the calls, on what their inputs hold now."""
        if sizes != self._sizes:
            self._set(sizes)
        num_made = self._replay(self._address, self.num_calls)
        assert num_made == self.num_calls, f"call {num_made} of the program names no kernel"

    def time_calls(self, sizes: Sizes = ()) -> list[float]:
        """Make the calls one at a time; the seconds each took, some 2 us of Python included."""
        address, seconds = self.slots_at(sizes).ctypes.data, []
        for place in self.places:
            start = perf_counter()
            self._replay(address + 8 * place, 1)
            seconds.append(perf_counter() - start)
        return seconds

    def _set(self, sizes: Sizes) -> None:
        bounds = zip(self._smallest, sizes, self._largest, strict=True)
        assert all(least <= size <= most for least, size, most in bounds), (
            f"recorded for sizes from {self._smallest} to {self._largest}, not {sizes}"
        )
        values = self._constant.copy()
        for slope, size in zip(self._slopes, sizes, strict=True):
            values += slope * size
        self._slots[self._varying] = values
        self._sizes = sizes


def record(
    function: Callable[..., Outputs], arena: Arena, smallest: Sizes = (), largest: Sizes = ()
) -> tuple[Program, Outputs]:
    """Record `function(*sizes)` for all sizes from smallest to largest; its outputs are a pytree of
    tensors.

    A replay writes the outputs in place, those of smaller sizes into their first rows. They lie in
    the arena, so they hold until anything else is replayed there. Nothing is computed here. Raises
    CaptureError.
    """
    if (reason := missing_reason()) or dispatch.is_reference_forced():
        raise CaptureError(
            f"there are no native kernels to record ({reason or 'reference forced'})"
        )
    constants = _Constants()
    with arena.remembering() as pieces:
        calls, outputs = _run_dry(function, largest, arena, constants)
    whole = calls.as_array()

    def slots_at(sizes: Sizes) -> np.ndarray[Any, Any]:
        with arena.following(pieces):
            other, _ = _run_dry(function, sizes, arena, constants)
        if other.names != calls.names:
            raise CaptureError("which kernels a captured step calls depends on its sizes")
        return other.as_array()

    slopes = [
        whole - slots_at((*largest[:i], most - 1, *largest[i + 1 :])) if most > least else 0 * whole
        for i, (least, most) in enumerate(zip(smallest, largest, strict=True))
    ]
    program = Program(calls, slopes, smallest, largest)
    if smallest != largest and not np.array_equal(program.slots_at(smallest), slots_at(smallest)):
        raise CaptureError("an argument of a captured step is not linear in its sizes")
    return program, outputs


def _run_dry(
    function: Callable[..., Outputs], sizes: Sizes, arena: Arena, constants: _Constants
) -> tuple[_Calls, Outputs]:
    num_live, calls = arena.num_live, _Calls(arena)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(intercepted_kernels(calls.add))
        stack.enter_context(_Addressed(calls))
        stack.enter_context(_OnlyKernels(arena, constants))
        outputs = function(*sizes)
    lasting: Outputs = pytree.tree_map_only(Tensor, arena.lasting, outputs)
    del outputs
    if arena.num_live > num_live:
        raise CaptureError(
            f"{arena.num_live - num_live} tensors made within a captured step outlive it without "
            "being among its outputs; something keeps them, and every replay would change them"
        )
    return calls, lasting


class _Calls:
    """Kernel calls as the slots `ls_replay` reads: number, then arguments."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._slots: list[int] = []
        self.names: list[str] = []
        """Of the kernels, in order."""
        self.places: list[int] = []
        """Where each call begins among the slots."""
        self.tensors: dict[int, Tensor] = {}
        """Those whose address was asked for, but for the arena's, which come and go."""

    @property
    def count(self) -> int:
        return len(self.names)

    def as_array(self) -> np.ndarray[Any, Any]:
        return np.array(self._slots, dtype=np.uint64).view(np.int64)

    def add(self, name: str, types: list[Any], args: tuple[Any, ...]) -> None:
        if name.startswith("pack"):  # whatever the format
            raise CaptureError("a weight was packed within the step; pack it before, once")
        self.names.append(name)
        self.places.append(len(self._slots))
        self._slots.append(native().ls_kernel_number(name.encode()))
        self._slots += (_slot(kind, value) for kind, value in zip(types, args, strict=True))

    def note_address(self, tensor: Tensor, address: int) -> None:
        if not self._arena.holds(tensor):
            self.tensors[address] = tensor


def _slot(kind: Any, value: Any) -> int:
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("<f", value), "little")
    return 0 if value is None else int(value) & _MASK


class _Addressed(TorchFunctionMode):
    """Sees which tensors' addresses are asked for."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.data_ptr:
            self._calls.note_address(args[0], result)
        return result


class _Constants:
    """Parameters converted to another dtype, each once: they stay as long as weights, and programs,
    do.
    """

    def __init__(self) -> None:
        self._converted: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    def converted(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor | None:
        """The result, None if it is no constant."""
        source = args[0]
        if not (isinstance(source, torch.nn.Parameter) or self._holds(source)):
            return None
        key = id(source), str((args[1:], kwargs))
        if key not in self._converted:
            self._converted[key] = source, func(*args, **(kwargs or {}))
        return self._converted[key][1]

    def _holds(self, tensor: Tensor) -> bool:
        return any(tensor is converted for _, converted in self._converted.values())


class _OnlyKernels(TorchDispatchMode):
    """Serves uninitialised memory from the arena, lets views pass, refuses every other torch op."""

    def __init__(self, arena: Arena, constants: _Constants) -> None:
        super().__init__()
        self._arena, self._constants = arena, constants

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
        if func is torch.ops.aten._to_copy.default:
            constant = self._constants.converted(func, args, kwargs)
            if constant is not None:
                return constant
        result = recorded_as_kernel(func, args, kwargs, self._arena.empty)
        if result is None:
            raise CaptureError(
                "a captured step may only call Lockstep's kernels, make views and ask for empty "
                f"memory, but {func} was called"
            )
        return result
