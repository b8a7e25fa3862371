"""Ops and their implementations: reference (plain torch, the specification) and native CPU.

Each op is a package: `reference.py`, `cpu.py`, and the public function in `__init__.py`. The
contract all of them keep: a row's result never depends on how many rows there are, what they hold,
or how many threads run.
"""

from lockstep.kernels.description import describe
from lockstep.kernels.dispatch import use_reference
from lockstep.kernels.native_library import (
    configuration,
    expect_work,
    force_isa,
    isa,
    isas,
    missing_reason,
    num_threads,
    set_num_threads,
)

__all__ = [
    "configuration",
    "describe",
    "expect_work",
    "force_isa",
    "isa",
    "isas",
    "missing_reason",
    "num_threads",
    "set_num_threads",
    "use_reference",
]
