"""Which implementation of an op runs, and why.

Every op is a `torch.library` op `lockstep::<name>` with a fake kernel, so it traces, compiles and
exports. Its CPU kernel is the native one where the library is there and takes the dtype, else the
reference, and the reason is logged once. `reference.py` of each op is the specification and always
can. No other device has kernels yet.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lockstep.kernels import native_library

logger = logging.getLogger("lockstep.kernels")
library = torch.library.Library("lockstep", "DEF")

Function = Callable[..., Any]


@dataclass(kw_only=True)
class Op:
    """One op: its two implementations, and why the native one was passed over, if it was."""

    name: str
    reference: Function
    native: Function
    skipped: list[str] = field(default_factory=list)

    def __call__(self, *args: Any) -> Any:
        if is_reference_forced() or _missing_library():
            return self.reference(*args)
        reason = _unsupported(args)
        if reason is None:
            return self.native(*args)
        if reason not in self.skipped:
            self.skipped.append(reason)
            logger.warning("%s: native kernel not used (%s); the reference runs", self.name, reason)
        return self.reference(*args)


_ops: dict[str, Op] = {}
_forced: str | None = None
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def define(schema: str, *, reference: Function, native: Function, fake: Function) -> Any:
    """Define `lockstep::<schema>`, bind its CPU kernel and fake kernel; return what callers call.

    That is the torch op, but for plain CPU tensors with nobody watching (no gradient, no tracing,
    no profiler) the kernel itself: the dispatcher would cost a tenth of a decode step.
    """
    name = schema.split("(", 1)[0]
    op = Op(name=name, reference=reference, native=native)
    _ops[name] = op
    library.define(schema)
    library.impl(name, op.__call__, "CPU")
    torch.library.register_fake(f"lockstep::{name}", fake, lib=library)
    overload = getattr(torch.ops.lockstep, name).default

    def call(*args: Any) -> Any:
        return op(*args) if is_plain(args[0]) else overload(*args)

    return call


def is_plain(first: Any) -> bool:
    """Whether kernels may be called on it without torch's dispatcher."""
    return (
        not torch.is_grad_enabled()
        and type(first) in _PLAIN_TYPES
        and first.is_cpu
        and not torch.compiler.is_compiling()
        and not torch.autograd._profiler_enabled()
    )


def autograd(name: str, *, backward: Function, setup_context: Function) -> None:
    """Give `lockstep::<name>` its backward pass."""
    torch.library.register_autograd(
        f"lockstep::{name}", backward, setup_context=setup_context, lib=library
    )


@contextmanager
def use_reference() -> Iterator[None]:
    """Run every op's reference inside the block: for tests that compare the two."""
    global _forced
    before, _forced = _forced, "reference"
    try:
        yield
    finally:
        _forced = before


def is_reference_forced() -> bool:
    return _forced == "reference"


def ops() -> dict[str, Op]:
    """Every op there is, by name."""
    for package in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if package.ispkg:  # an op is known once its package is imported
            importlib.import_module(f"lockstep.kernels.{package.name}")
    return dict(sorted(_ops.items()))


@functools.cache
def _missing_library() -> bool:
    reason = native_library.missing_reason()
    if reason:
        logger.warning(
            "native kernels are not used (%s); the reference kernels run, slowly", reason
        )
    return reason is not None


def _unsupported(args: tuple[Any, ...]) -> str | None:
    first = args[0]
    if first.dtype not in NATIVE_DTYPES:
        return f"dtype {str(first.dtype).removeprefix('torch.')} (it takes float32 and bfloat16)"
    return None
