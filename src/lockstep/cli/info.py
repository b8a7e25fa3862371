"""`lockstep info`: what a bug report should say, and which kernels run here."""

from __future__ import annotations

from dataclasses import asdict
from json import dumps
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from lockstep.core.hardware import detect_hardware, detect_versions

if TYPE_CHECKING:
    from lockstep.kernels.description import Description

command = App(name="info")


@command.default
def show_machine() -> None:
    """Show versions and hardware."""
    hardware, versions = detect_hardware(), detect_versions()
    table = _table()
    table.add_row("lockstep", versions.lockstep)
    table.add_row("python", versions.python)
    for name, version in versions.packages.items():
        table.add_row(name, version)
    table.add_row("system", versions.operating_system)
    table.add_row("processor", f"{hardware.cpu_model}, {hardware.num_cpus} usable cores")
    table.add_row("instruction sets", " ".join(hardware.instruction_sets) or "none we use")
    table.add_row("memory", f"{hardware.memory_bytes / 2**30:.1f} GiB")
    table.add_row("GPUs", ", ".join(hardware.gpus) or "none")
    _console().print(table)


@command.command(name="kernels")
def show_kernels(*, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Show which kernels run here and why: instruction set, threads, huge pages, and every op.

    Parameters
    ----------
    json
        Print it as JSON.
    """
    from lockstep import kernels  # torch: two seconds that `lockstep info` alone need not pay

    described = kernels.describe()
    if json:
        print(dumps(asdict(described), indent=2))
        return
    console = _console()
    console.print(_library_table(described))
    if described.instruction_sets:
        table = _table("instruction set", "runs", "why")
        for row in described.instruction_sets:
            table.add_row(row.name, "yes" if row.runs else "no", row.reason)
        console.print("", table)
    table = _table("op", "runs")
    ops_of: dict[str, list[str]] = {}
    for op, choice in described.ops.items():
        table.add_row(op, choice.runs)
        for reason in choice.passed_over:
            ops_of.setdefault(reason, []).append(op)
    console.print("", table)
    for reason, ops in ops_of.items():
        names = "every op" if len(ops) == len(described.ops) else ", ".join(ops)
        console.print(f"\nPassed over for {names}: {reason}", soft_wrap=True, markup=False)


def _library_table(described: Description) -> Table:
    table = _table()
    found = f"ABI {described.abi}" if described.missing is None else "not used"
    table.add_row("library", f"{described.library} ({found})")
    table.add_row("CPU features", " ".join(described.cpu_features) or "none we use")
    table.add_row("threads", str(described.threads))
    table.add_row("huge pages", described.huge_pages)
    if described.missing is None:
        dtypes = " and ".join(described.native_dtypes)
        table.add_row("dtypes", f"native kernels take {dtypes}; the reference runs for others")
    return table


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, show_header=bool(columns), padding=(0, 2, 0, 0))


def _console() -> Console:
    return Console(highlight=False)
