"""Our linear beside torch's, at the shapes of SmolLM2-135M: is it faster for few rows?

Hot: one weight again and again. Cold: weights taken in turn from more than 64 MB of them, as a
decode step meets them. Both systems get the weight in the layout they want, packed beforehand.
Rounds are interleaved; `--rows` and `--rounds` shorten a run. Writes
benchmarks/results/linear_beside_torch.json.
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
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from lockstep import kernels
from lockstep.core.hardware import detect_hardware, detect_versions
from lockstep.core.progress import Progress
from lockstep.core.run_folder import as_json, git_revision
from lockstep.kernels.linear import PackCache, linear

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks/results/linear_beside_torch.json"
SHAPES_KN = ((576, 192), (576, 576), (576, 1536), (1536, 576), (576, 49152))
ROWS = (1, 2, 4, 8, 32, 128, 512)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COLD_BYTES = 64 << 20
MIN_SAMPLE_S = 0.004
IDLE_S = 0.01
FEW_ROWS = 8
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Microseconds of one product, by round."""

    precision: str
    k: int
    n: int
    rows: int
    weights: str
    """hot or cold"""
    ours_us: list[float]
    torch_us: list[float]

    @property
    def speedup(self) -> float:
        return median(self.torch_us) / median(self.ours_us)


class Products:
    """The same weights for both systems, enough of them to be cold if that is wanted."""

    def __init__(self, k: int, n: int, dtype: torch.dtype, *, weights: str) -> None:
        num_bytes = k * n * dtype.itemsize
        copies = COLD_BYTES // num_bytes + 1 if weights == "cold" else 1
        generator = torch.Generator().manual_seed(SEED)
        first = torch.randn(n, k, generator=generator).to(dtype)
        self._weights = [first.clone() for _ in range(copies)]
        self._packs = [PackCache() for _ in range(copies)]

    def ours(self, x: Tensor) -> None:
        for weight, packs in zip(self._weights, self._packs, strict=True):
            linear(x, weight, packs=packs)

    def theirs(self, x: Tensor) -> None:
        for weight in self._weights:
            torch_linear(x, weight)

    def __len__(self) -> int:
        return len(self._weights)


def repeats_for(action: Callable[[], None]) -> int:
    """How often to run it for a sample that the clock and the scheduler do not blur."""
    action()
    start = perf_counter()
    action()
    return max(1, round(MIN_SAMPLE_S / max(perf_counter() - start, 1e-9)))


def time_us(action: Callable[[], None], *, repeats: int, products: int) -> float:
    """Waits first until the other system's idle threads have stopped spinning on our cores."""
    sleep(IDLE_S)
    action()
    start = perf_counter()
    for _ in range(repeats):
        action()
    return (perf_counter() - start) / (repeats * products) * 1e6


@torch.no_grad()
def measure(products: Products, x: Tensor, *, rounds: int) -> tuple[list[float], list[float]]:
    actions = (lambda: products.ours(x), lambda: products.theirs(x))
    repeats = [repeats_for(action) for action in actions]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for action, count, kept in zip(actions, repeats, times, strict=True):
            kept.append(time_us(action, repeats=count, products=len(products)))
    return times


def measurements(rows: tuple[int, ...], rounds: int) -> Iterator[Measurement]:
    for precision, (k, n), weights in product(DTYPES, SHAPES_KN, ("hot", "cold")):
        dtype = DTYPES[precision]
        products = Products(k, n, dtype, weights=weights)
        for m in rows:
            x = torch.randn(m, k, generator=torch.Generator().manual_seed(SEED)).to(dtype)
            ours, theirs = measure(products, x, rounds=rounds)
            yield Measurement(
                precision=precision,
                k=k,
                n=n,
                rows=m,
                weights=weights,
                ours_us=ours,
                torch_us=theirs,
            )


def table_of(found: list[Measurement]) -> Table:
    """One line a shape, one column a number of rows; torch's time over ours."""
    rows = sorted({each.rows for each in found})
    table = Table(title="Our linear against torch's: torch's time / ours (ours in us)")
    for name in ("precision", "K x N", "weights"):
        table.add_column(name)
    for m in rows:
        table.add_column(f"M={m}", justify="right")
    lines: dict[tuple[str, str, str], dict[int, Measurement]] = {}
    for each in found:
        key = (each.precision, f"{each.k} x {each.n}", each.weights)
        lines.setdefault(key, {})[each.rows] = each
    for key, by_rows in lines.items():
        cells = [f"{by_rows[m].speedup:.2f} ({median(by_rows[m].ours_us):,.1f})" for m in rows]
        table.add_row(*key, *cells)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    kernels.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)  # our library has left torch one
    with Progress() as progress:
        total = len(DTYPES) * len(SHAPES_KN) * 2 * len(args.rows)
        each = measurements(tuple(args.rows), args.rounds)
        found = list(progress.track(each, "linear", total=total, unit="products"))
    record = {
        "date": date.today().isoformat(),
        "git": git_revision(ROOT),
        "hardware": as_json(detect_hardware()),
        "versions": as_json(detect_versions()),
        "kernels": kernels.isa() or kernels.missing_reason(),
        "threads": args.threads,
        "seed": SEED,
        "measurements": [asdict(each) | {"speedup": each.speedup} for each in found],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    Console(width=140).print(table_of(found))
    few = [each for each in found if each.rows <= FEW_ROWS]
    slower = [each for each in few if each.speedup < 1]
    print(f"At most {FEW_ROWS} rows: faster than torch in {len(few) - len(slower)} of {len(few)}")
    for each in slower:
        place = f"{each.precision} {each.k} x {each.n}, {each.rows} rows, {each.weights}"
        print(f"  slower: {place}: {each.speedup:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
