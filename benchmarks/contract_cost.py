"""What the fixed order of summation costs: our kernels beside ones whose order is free.

The others (comparison.c, never shipped) may hold several sums of an output along K and cut K among
threads; each shape takes the fastest of their plans. Both run the model's products in a single
native call: ours as a captured program, theirs as a loop. Up to 8 rows weights are cold, as a
decode step meets them; above, one weight is used again and again. In int8 ours also quantises the
activations and scales the sums, which theirs do not, so that figure bounds the cost from above.
Rounds are interleaved. Writes benchmarks/results/contract_cost.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import torch
from compiled import comparison
from free_order import FreeProduct, Kind
from rich.console import Console
from rich.table import Table

from lockstep import kernels
from lockstep.core.hardware import detect_hardware, detect_versions
from lockstep.core.progress import Progress
from lockstep.core.quantization import parse_scheme
from lockstep.core.run_folder import as_json, git_revision
from lockstep.kernels.arena import Arena
from lockstep.kernels.capture import Program, record
from lockstep.kernels.linear import PackCache, linear
from lockstep.kernels.linear.formats import quantize_rtn

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/contract_cost.json"
SHAPES_KN = ((576, 576), (576, 1536), (1536, 576), (576, 49152))
ROWS = (1, 8, 128, 512)
KINDS: tuple[Kind, ...] = ("bf16", "int8")
COLD_ROWS = 8
COLD_BYTES = 64 << 20
ARENA_BYTES = 256 << 20
MIN_SAMPLE_S = 0.02
IDLE_S = 0.01
ALLOWED = 1.03
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Microseconds of one product, by round; and the free plan that was fastest."""

    kind: Kind
    k: int
    n: int
    rows: int
    ours_us: list[float]
    free_us: list[float]
    plan: dict[str, int]

    @property
    def cost(self) -> float:
        """How many times as long ours takes: best of the rounds over best of the rounds."""
        return min(self.ours_us) / min(self.free_us)


def our_program(
    kind: Kind, m: int, k: int, n: int, *, copies: int, arena: Arena
) -> tuple[Program, torch.Tensor]:
    """The products of the same rows with `copies` weights; `arena` must live as long."""
    generator = torch.Generator().manual_seed(SEED)
    x = torch.randn(m, k, generator=generator).bfloat16()
    first = torch.randn(n, k, generator=generator).bfloat16()
    weights = [first.clone() for _ in range(copies)]
    if kind == "int8":
        weights = [quantize_rtn(weight.float(), parse_scheme("int8")) for weight in weights]
    packs = [PackCache() for _ in weights]

    def products() -> torch.Tensor:
        for weight, cache in zip(weights, packs, strict=True):
            y = linear(x, weight, packs=cache)
        return y

    with torch.no_grad():
        products()  # packs the weights
        return record(products, arena)


def repeats_for(action: Callable[[], None]) -> int:
    start = perf_counter()
    action()
    return max(1, round(MIN_SAMPLE_S / max(perf_counter() - start, 1e-9)))


def time_us(action: Callable[[], None], *, repeats: int, products: int) -> float:
    """Waits first until the other side's idle threads have stopped spinning on our cores."""
    sleep(IDLE_S)
    action()
    start = perf_counter()
    for _ in range(repeats):
        action()
    return (perf_counter() - start) / (repeats * products) * 1e6


def measure(kind: Kind, m: int, k: int, n: int, *, rounds: int) -> Measurement:
    free = FreeProduct(kind, m, k, n)
    copies = COLD_BYTES // free.weight_bytes + 1 if m <= COLD_ROWS else 1
    free = FreeProduct(kind, m, k, n, copies=copies)
    arena = Arena(ARENA_BYTES)
    program, _ = our_program(kind, m, k, n, copies=copies, arena=arena)
    timed = []
    for plan in free.plans():
        free.plan = plan
        free.run()
        best = min(time_us(free.run, repeats=1, products=copies) for _ in range(3))
        timed.append((best, plan))
    free.plan = min(timed, key=lambda pair: pair[0])[1]
    actions = (program.replay, free.run)
    repeats = [repeats_for(action) for action in actions]
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            each = time_us(actions[side], repeats=repeats[side], products=copies)
            times[side].append(each)
    return Measurement(
        kind=kind, k=k, n=n, rows=m, ours_us=times[0], free_us=times[1], plan=asdict(free.plan)
    )


def measurements(kinds: list[Kind], rows: list[int], rounds: int) -> Iterator[Measurement]:
    for kind, m, (k, n) in product(kinds, rows, SHAPES_KN):
        yield measure(kind, m, k, n, rounds=rounds)


def table_of(found: list[Measurement]) -> Table:
    table = Table(title="Our time over that of a free order of summation (ours in us)")
    for name in ("kind", "K x N", *(f"M={m}" for m in sorted({each.rows for each in found}))):
        table.add_column(name)
    lines: dict[tuple[str, str], list[str]] = {}
    for each in sorted(found, key=lambda m: m.rows):
        text = f"{each.cost:.3f} ({median(each.ours_us):,.1f})"
        lines.setdefault((each.kind, f"{each.k} x {each.n}"), []).append(text)
    for key, texts in lines.items():
        table.add_row(*key, *texts)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    kernels.set_num_threads(args.threads)
    comparison().set_threads(args.threads)
    with Progress() as progress:
        total = len(args.kinds) * len(SHAPES_KN) * len(args.rows)
        each = measurements(args.kinds, args.rows, args.rounds)
        found = list(progress.track(each, "contract", total=total, unit="products"))
    result = {
        "date": date.today().isoformat(),
        "git": git_revision(ROOT),
        "hardware": as_json(detect_hardware()),
        "versions": as_json(detect_versions()),
        "kernels": kernels.isa() or kernels.missing_reason(),
        "threads": args.threads,
        "seed": SEED,
        "measurements": [asdict(each) | {"cost": each.cost} for each in found],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    Console(width=140).print(table_of(found))
    for kind in args.kinds:
        costs = sorted(each.cost for each in found if each.kind == kind)
        above = sum(cost > ALLOWED for cost in costs)
        print(
            f"{kind}: median {median(costs):.3f}, highest {costs[-1]:.3f}, "
            f"{above} of {len(costs)} above {ALLOWED}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
