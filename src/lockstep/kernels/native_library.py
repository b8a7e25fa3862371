"""Finds and binds the native CPU library: a plain C ABI reached through ctypes, no torch headers.

Tensors cross as addresses and sizes, so one binary serves every torch version. The library holds
the kernels compiled for several instruction sets and picks the best the CPU has when it loads.
Two environment variables override that, for a diagnosis: LOCKSTEP_NATIVE_LIBRARY is the path of
another build, LOCKSTEP_ISA the instruction set that this process and its children use.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lockstep.core.errors import ConfigError

ABI_VERSION = 5
LIBRARY_VARIABLE = "LOCKSTEP_NATIVE_LIBRARY"
ISA_VARIABLE = "LOCKSTEP_ISA"
ISAS = ("avx512bf16", "avx512vnni", "avx512", "avx2", "portable")
"""What a build for x86-64 has when the compiler knows it all, best first."""
_FILE = "liblockstep_native.so"

_intercepting = threading.Lock()
_intercepted_thread: int | None = None
_configurations = itertools.count(1)
_configuration = 0

_int, _float, _ptr, _long = ctypes.c_int, ctypes.c_float, ctypes.c_void_p, ctypes.c_int64

# name -> argument types of what does not depend on the instruction set
_SERVICES: dict[str, list[Any]] = {
    "ls_set_threads": [_int],
    "ls_advise_huge_pages": [_ptr, _long],
    "ls_force_isa": [ctypes.c_char_p],
    "ls_kernel": [ctypes.c_char_p],
    "ls_kernel_number": [ctypes.c_char_p],
    "ls_pool_wake": [],
    "ls_replay": [_ptr, _long],
}

# name -> argument types of the kernels; the C declarations are in native/lockstep_native.h
_KERNELS: dict[str, list[Any]] = {
    "pack": [_ptr, _int, _ptr, _int, *[_long] * 5, _int, _long, _long],
    "pack_quantised": [_ptr, _long, *[_ptr] * 5, *[_long] * 3, _int],
    "gemm": [
        *[_ptr, _int, _long],
        *[_ptr, _int, _long],
        *[_ptr, _float],
        *[_ptr, _long],
        _ptr,
        *[_ptr, _long],
        *[_long] * 3,
        *[_int] * 2,
    ],
    "quantise_rows": [_ptr, _ptr, _ptr, _int, *[_long] * 3],
    "rms_norm": [_ptr, _ptr, _ptr, _int, _int, _long, _long, _float],
    "rms_norm_backward": [*[_ptr] * 6, _int, _int, _long, _long, _float],
    "rope": [_ptr, _ptr, _int, _ptr, _ptr, _ptr, _long, _long, _long, _long, _int],
    "silu_mul": [_ptr, _ptr, _ptr, _int, _long],
    "silu_mul_backward": [*[_ptr] * 6, _int, *[_long] * 3],
    "embedding": [_ptr, _int, _ptr, _int, _ptr, _long, _long],
    "embedding_quantised": [_ptr, _int, _ptr, _long, _ptr, _long, _long],
    "scale": [_ptr, _ptr, _int, _float, _long],
    "embedding_backward": [_ptr, _ptr, _int, _ptr, _long, _long],
    "add": [_ptr, _ptr, _ptr, _int, _long],
    "copy_rows": [_ptr, _ptr, _long, _long, _long, _long],
    "column_sum": [_ptr, _ptr, _int, _long, _long],
    "split_qkv": [
        *[_ptr] * 4,
        _int,
        _long,
        *[_ptr] * 5,
        _int,
        _float,
        *[_long] * 4,
    ],
    "split_qkv_backward": [
        *[_ptr] * 8,
        _int,
        _long,
        *[_ptr] * 5,
        _int,
        _float,
        *[_long] * 4,
    ],
    "attention": [
        *[_ptr] * 5,
        _int,
        _long,
        _long,
        *[_ptr] * 4,
        _int,
        *[_ptr] * 5,
        _int,
        _float,
        _ptr,
        _long,
        _ptr,
        _ptr,
        *[_long] * 5,
        _float,
        _long,
    ],
    "attention_backward": [*[_ptr] * 9, _int, _ptr, *[_long] * 5, _float, _long],
    "row_logprobs": [*[_ptr] * 6, _long, _long],
    "row_softmax_grad": [_ptr, _int, _ptr, _ptr, _ptr, _ptr, _ptr, _long, _long],
    "sample": [*[_ptr] * 9, _long, _long],
    "grad_weight": [_ptr, _ptr, _ptr, _int, *[_long] * 5, _int],
    "adamw": [_ptr, _ptr, _ptr, _ptr, _long, *[_float] * 8],
    "sum_of_squares": [_ptr, _ptr, _long],
}

DTYPE_CODE = {torch.float32: 0, torch.bfloat16: 1}


@functools.cache
def _load() -> ctypes.CDLL | str:
    """The bound library, or the reason there is none."""
    path = library_path()
    if not path.exists():
        return f"{path} is not built; reinstall where a C++17 compiler is at hand"
    library = ctypes.CDLL(str(path))
    library.ls_abi_version.restype = _int
    if library.ls_abi_version() != ABI_VERSION:
        found = library.ls_abi_version()
        return f"{path} has ABI {found}, this Lockstep wants {ABI_VERSION}; reinstall"
    for name, types in _SERVICES.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = None
    library.ls_force_isa.restype = _int
    library.ls_kernel.restype = _ptr
    library.ls_kernel_number.restype = _long
    library.ls_replay.restype = _long
    _bind_kernels(library)
    library.ls_isa.restype = ctypes.c_char_p
    library.ls_isas.restype = ctypes.c_char_p
    library.ls_threads.restype = _int
    if wanted := os.environ.get(ISA_VARIABLE):
        _use_isa(library, wanted, named_by=f"{ISA_VARIABLE}=")
    # torch's OpenMP workers spin on the cores our pool needs (prefill 908 against 1,278 tokens/s);
    # what is left to torch is small.
    torch.set_num_threads(1)
    return library


def _bind_kernels(library: ctypes.CDLL) -> None:
    """Make `library.ls_<kernel>` call the kernels of the instruction set in use."""
    for name, types in _KERNELS.items():
        address_of_kernel = library.ls_kernel(name.encode())
        assert address_of_kernel, f"the native library has no kernel {name!r}"
        setattr(library, f"ls_{name}", ctypes.CFUNCTYPE(None, *types)(address_of_kernel))


@contextmanager
def intercepted_kernels(
    on_call: Callable[[str, list[Any], tuple[Any, ...]], None],
) -> Iterator[None]:
    """Inside the block, `on_call(name, argument types, arguments)` instead of each kernel call of
    this thread; other threads' calls go by unseen, and a second thread's block waits for this one's
    end.
    """
    global _intercepted_thread
    library, thread = native(), threading.get_ident()

    def intercepted(name: str, types: list[Any], kernel: Any) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if threading.get_ident() == thread:
                on_call(name, types, args)
            else:
                kernel(*args)

        return call

    with _intercepting:
        _intercepted_thread = thread
        for name, types in _KERNELS.items():
            setattr(library, f"ls_{name}", intercepted(name, types, getattr(library, f"ls_{name}")))
        try:
            yield
        finally:
            _bind_kernels(library)
            _intercepted_thread = None


def is_intercepted() -> bool:
    """Whether this thread's kernel calls compute nothing, so that tensors hold anything at all."""
    return _intercepted_thread == threading.get_ident()


def missing_reason() -> str | None:
    """None when the native library is loaded, else why not."""
    library = _load()
    return library if isinstance(library, str) else None


def native() -> ctypes.CDLL:
    """The library; only to be called after `missing_reason()` said None."""
    library = _load()
    assert isinstance(library, ctypes.CDLL), library
    return library


def library_path() -> Path:
    override = os.environ.get(LIBRARY_VARIABLE)
    return Path(override) if override else Path(__file__).parent / _FILE


def isa() -> str:
    """Name of the instruction set in use, one of `isas()`."""
    return str(native().ls_isa().decode())


def isas() -> dict[str, tuple[str, ...]]:
    """Every instruction set of the library, best first, and the CPU features that each lacks here;
    none: it runs.
    """
    return _isas_of(native())


def force_isa(name: str) -> None:
    """Use one instruction set from now on; ConfigError when this CPU lacks it. For tests and
    comparison.
    """
    _use_isa(native(), name)
    _note_configuration()


def _isas_of(library: ctypes.CDLL) -> dict[str, tuple[str, ...]]:
    lines = (line.partition(":") for line in library.ls_isas().decode().splitlines())
    return {name: tuple(missing.split()) for name, _, missing in lines}


def _use_isa(library: ctypes.CDLL, name: str, *, named_by: str = "") -> None:
    if library.ls_force_isa(name.encode()) != 0:
        known = _isas_of(library)
        why = (
            f"this CPU lacks {' '.join(known[name])}"
            if name in known
            else f"the native library has {', '.join(known)}"
        )
        usable = ", ".join(known_name for known_name, missing in known.items() if not missing)
        raise ConfigError(
            f"instruction set {named_by}{name} cannot be used: {why}; use one of {usable}"
        )
    _bind_kernels(library)


def set_num_threads(count: int) -> None:
    """Threads of the kernels (torch itself keeps one beside ours); results do not depend on it."""
    if count < 1:
        raise ConfigError(f"threads must be at least 1, got {count}")
    if missing_reason() is None:
        native().ls_set_threads(count)
    else:
        torch.set_num_threads(count)
    _note_configuration()


def expect_work() -> None:
    """Have the kernels' parked threads wait awake for what is about to come."""
    if missing_reason() is None:
        native().ls_pool_wake()


def configuration() -> int:
    """A number that changes with the instruction set and the number of threads: whatever was
    prepared for them (a captured step) is worth nothing when it has.
    """
    return _configuration


def _note_configuration() -> None:
    global _configuration
    _configuration = next(_configurations)


def num_threads() -> int:
    return int(native().ls_threads()) if missing_reason() is None else torch.get_num_threads()


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
