"""comparison.c as a library, compiled for this machine on first use."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path

from systems import WORK

SOURCE = Path(__file__).parent / "comparison.c"
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-Wall", "-Wextra")
_long, _ptr = ctypes.c_int64, ctypes.c_void_p


@cache
def comparison() -> ctypes.CDLL:
    """Raises subprocess.CalledProcessError where it does not compile, as without AVX-512 BF16."""
    library = WORK / "comparison.so"
    if not library.exists() or library.stat().st_mtime < SOURCE.stat().st_mtime:
        library.parent.mkdir(exist_ok=True)
        partial = library.with_suffix(".partial")
        subprocess.run(["cc", *FLAGS, "-o", str(partial), str(SOURCE)], check=True)
        partial.rename(library)
    loaded = ctypes.CDLL(str(library))
    loaded.read_all.argtypes = [_ptr, _long]
    loaded.read_all.restype = ctypes.c_uint64
    for name in ("free_bf16", "free_int8"):
        function = getattr(loaded, name)
        function.argtypes = [_ptr, _ptr, _long, _ptr, *[_long] * 7, _ptr]
        function.restype = None
    loaded.set_threads.argtypes = [ctypes.c_int]
    loaded.set_threads.restype = None
    return loaded
