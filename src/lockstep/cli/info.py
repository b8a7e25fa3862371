"""`lockstep info`: what a bug report should say, and which kernels run here."""

from __future__ import annotations

from cyclopts import App
from rich.console import Console
from rich.table import Table

from lockstep.core.hardware import detect_hardware, detect_versions

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
def show_kernels() -> None:
    """Show, for each op, which implementation runs here and why others were passed over."""
    from lockstep import kernels  # torch: two seconds that `lockstep info` alone need not pay

    described = kernels.describe()
    table = _table("op", "runs")
    ops_of: dict[str, list[str]] = {}
    for op, row in described.items():
        table.add_row(op, row["runs"])
        if row["passed over"]:
            ops_of.setdefault(row["passed over"], []).append(op)
    console = _console()
    console.print(table)
    for reason, ops in ops_of.items():
        names = "every op" if len(ops) == len(described) else ", ".join(ops)
        console.print(f"\nPassed over for {names}: {reason}", soft_wrap=True, markup=False)


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, show_header=bool(columns), padding=(0, 2, 0, 0))


def _console() -> Console:
    return Console(highlight=False)
