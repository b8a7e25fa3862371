"""Fail if a SIMD object of the native library defines a symbol that another object defines too.

The files in native/simd/ are compiled several times, each for another instruction set, and linked
into one library. If two objects define the same inline function or template (`std::max<float>`,
say), the linker keeps either, and AVX-512 instructions can end up on the path of a CPU without
them. So whatever a SIMD object defines lies in the namespace of its instruction set, or is static.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

BUILD = Path(__file__).parent.parent / "build" / "native" / "CMakeFiles"


def main() -> int:
    if shutil.which("nm") is None:
        print("Native symbols: not checked, there is no nm")
        return 0
    variants_of: dict[str, set[str]] = defaultdict(set)
    for object_file in sorted(BUILD.glob("*.dir/**/*.o")):
        variant = object_file.relative_to(BUILD).parts[0].removesuffix(".dir")
        if variant == "native_cases":  # a program of its own with the same common sources
            continue
        for symbol in global_symbols(object_file):
            variants_of[symbol].add(variant)
    clashes = {name: variants for name, variants in variants_of.items() if len(variants) > 1}
    for name, variants in clashes.items():
        print(f"{name} is defined in {', '.join(sorted(variants))}; make it static")
    if not clashes:
        print(f"Native symbols: {len(variants_of)}, none in two variants")
    return 1 if clashes else 0


def global_symbols(object_file: Path) -> list[str]:
    """The external and weak symbols that an object file defines, demangled."""
    listed = subprocess.run(
        ["nm", "--demangle", "--defined-only", "--extern-only", "--format=posix", str(object_file)],
        capture_output=True,
        text=True,
        check=True,
    )
    # A line is: name, type letter, address, size; a demangled name may hold spaces.
    names = [line.rsplit(maxsplit=3)[0] for line in listed.stdout.splitlines() if line.strip()]
    # A pointer to the runtime's exception handler, not code of ours.
    return [name for name in names if not name.startswith("DW.ref.")]


if __name__ == "__main__":
    sys.exit(main())
