"""Lockstep beside its peers in one run: prefill, first token, decode, memory, start-up, training.

Every system has the same weights and threads (systems.py, workload.py); bench.py measures. A run is
added to benchmarks/results/side_by_side.json, so that a long campaign can be made in several calls;
the table and the plot are made of all of them. Losses are published like wins. `make bench` runs
it; `--help` says how to run a part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from time import perf_counter
from typing import Any

from bench import Bench
from plots import plot
from results import OURS, Result, load_result, merge, models_of, write_result
from rich.console import Console
from systems import ROOT, SYSTEMS, systems_named
from tables import markdown, terminal_table, write_between_markers
from workload import PARTS, PRECISIONS, SEED, Case, cases_of

from lockstep.core.hardware import detect_hardware
from lockstep.core.progress import Progress
from lockstep.core.run_folder import as_json, git_revision

RESULT = ROOT / "benchmarks/results/side_by_side.json"
MODELS = {"smollm2": "smollm2", "qwen": "qwen2.5-coder-0.5b"}
TITLES = {
    "smollm2": "SmolLM2-135M-Instruct",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct",
}


def measure(
    args: argparse.Namespace, *, cases: Sequence[Case], result: Result, out: Path
) -> Result:
    """Make a run, and write the result after each part of it."""
    model = MODELS[args.model]
    now = datetime.now()
    run = f"{now:%Y-%m-%dT%H:%M:%S} {model}"
    start = perf_counter()
    bench = Bench(model, systems_named(args.peers), rounds=args.rounds, threads=args.threads)
    machine = bench.machine(cases)

    def record() -> Result:
        found = bench.findings
        about = {
            "model": TITLES[model],
            "date": f"{now:%Y-%m-%d}",
            "git": git_revision(ROOT),
            "hardware": as_json(detect_hardware()),
            "threads": args.threads,
            "rounds": args.rounds,
            "seed": SEED,
            "systems": found.systems,
            "machine": machine,
            "limits": bench.limits(cases, machine),
            "agreement": bench.agreement(),
            "losses": found.losses,
            "missing": found.missing,
            "seconds": perf_counter() - start,
        }
        return merge(result, run, about, found.samples)

    with Progress() as progress:
        bench.run(cases, progress, on_part=lambda: write_result(out, record()))
    machine = highest(machine, bench.machine(cases))
    merged = record()
    write_result(out, merged)
    return merged


def highest(a: Any, b: Any) -> Any:
    """The higher of both, number by number."""
    return {name: highest(a[name], b[name]) for name in a} if isinstance(a, dict) else max(a, b)


def listed(allowed: Sequence[str]) -> Any:
    """A comma-separated option."""

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name.lower() not in map(str.lower, allowed)]:
            raise argparse.ArgumentTypeError(
                f"{unknown[0]!r} is none of {', '.join(allowed)} (comma-separated)"
            )
        return names

    return parse


def arguments() -> argparse.Namespace:
    peers = [system.name for system in SYSTEMS if system.name != OURS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--only", type=listed(PARTS), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument(
        "--precisions",
        type=listed(PRECISIONS),
        default=["bf16", "int8", "int4"],
        help=",".join(PRECISIONS),
    )
    parser.add_argument("--peers", type=listed(peers), default=[], help=f"all of {','.join(peers)}")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULT, help="the JSON to add the run to")
    parser.add_argument("--show", action="store_true", help="measure nothing; show --out again")
    parser.add_argument("--markdown", type=Path, help="the page whose table to replace: README.md")
    parser.add_argument("--plot", type=Path, help="folder for a plot of each model")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    result = load_result(args.out)
    if not args.show:
        cases = cases_of(args.only, args.precisions)
        result = measure(args, cases=cases, result=result, out=args.out)
    console = Console(width=200)
    for model in models_of(result):
        console.print(terminal_table(result, model))
        if args.plot:
            print(plot(result, model, args.plot))
    if args.markdown:
        write_between_markers(args.markdown, markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
