"""What runs on this machine and why: the data behind `lockstep info kernels`."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lockstep.core.hardware import detect_hardware
from lockstep.kernels import dispatch, huge_pages, native_library


@dataclass(frozen=True, kw_only=True)
class InstructionSet:
    """One variant of the native kernels."""

    name: str
    runs: bool
    """It is the one in use."""
    reason: str
    """Why it is in use, or why not."""


@dataclass(frozen=True, kw_only=True)
class OpChoice:
    """What runs for one op."""

    runs: str
    """`native <instruction set>` or `reference`."""
    passed_over: tuple[str, ...]
    """Why the native kernel is not used, or was not at some call of this process."""


@dataclass(frozen=True, kw_only=True)
class Description:
    """The kernels of this process: the native library, what it chose, and each op."""

    library: str
    """Path of the native library, or where it should be."""
    missing: str | None
    """Why there is no native library; None when there is one."""
    abi: int | None
    cpu_features: tuple[str, ...]
    instruction_sets: tuple[InstructionSet, ...]
    """Best first."""
    native_dtypes: tuple[str, ...]
    """Dtypes of activations the native kernels take; the reference runs for others."""
    threads: int
    huge_pages: str
    ops: dict[str, OpChoice]


def describe() -> Description:
    missing = native_library.missing_reason()
    runs = "reference" if missing else f"native {native_library.isa()}"
    dtypes = [str(dtype).removeprefix("torch.") for dtype in dispatch.NATIVE_DTYPES]
    return Description(
        library=str(native_library.library_path()),
        missing=missing,
        abi=None if missing else native_library.ABI_VERSION,
        cpu_features=detect_hardware().instruction_sets,
        instruction_sets=() if missing else _instruction_sets(),
        native_dtypes=tuple(dtypes),
        threads=native_library.num_threads(),
        huge_pages=huge_pages.state(),
        ops={
            name: OpChoice(runs=runs, passed_over=(missing,) if missing else tuple(op.skipped))
            for name, op in dispatch.ops().items()
        },
    )


def _instruction_sets() -> tuple[InstructionSet, ...]:
    built, used = native_library.isas(), native_library.isa()
    names = dict.fromkeys((*native_library.ISAS, *built))
    best = next(name for name, lacks in built.items() if not lacks)
    rows = []
    for name in names:
        if name not in built:
            reason = "this library is built without it"
        elif built[name]:
            reason = f"this CPU lacks {' '.join(built[name])}"
        elif name == used == best:
            reason = "the best this CPU runs"
        elif name == used:
            named = os.environ.get(native_library.ISA_VARIABLE) == name
            reason = f"{native_library.ISA_VARIABLE} says so" if named else "chosen by force_isa"
        else:
            reason = f"runs here, but {used} is in use"
        rows.append(InstructionSet(name=name, runs=name == used, reason=reason))
    return tuple(rows)
