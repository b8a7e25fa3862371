"""Lockstep beside llama.cpp and transformers in one run: prefill, decode at three batches, SFT.

Every system has the same weights, the same threads and a process of its own that is stopped while
another is measured; rounds are interleaved and their order rotates. `make bench` runs it; see
`--help`. Writes benchmarks/results/side_by_side.json with every sample. Losses are published too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

from expand_gguf import expand_gguf
from limits import ELEMENT_BYTES, ModelShape, limit_tokens_per_s
from rich.console import Console
from tables import OURS, RAW, load_result, markdown, terminal_table, write_between_markers
from worker_process import Worker
from workload import (
    SEED,
    WARM_UP_TOKENS,
    Case,
    decode_prompts,
    inference_cases,
    prefill_prompt,
    sft_documents,
)

from lockstep.core.hardware import detect_hardware
from lockstep.core.progress import Progress
from lockstep.core.run_folder import as_json, git_revision
from lockstep.models.fetch import fetch_gguf, fetch_model
from lockstep.text.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
WORK = ROOT / ".benchmarks"
PEER_PYTHON = WORK / "venv/bin/python"
RESULT = ROOT / "benchmarks/results/side_by_side.json"
SCRIPTS = {
    OURS: "ours_worker",
    "llama.cpp": "llama_cpp_worker",
    "transformers": "transformers_worker",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int
    threads: int
    batches: tuple[int, ...]
    sft: tuple[str, ...]
    raw: bool


class Bench:
    """Workers, prompts, and the samples so far."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._folder = fetch_model("smollm2", quiet=True)
        shipped = fetch_gguf("smollm2", quiet=True)
        self._gguf = {"q4_1": shipped} | {
            precision: expand_gguf(shipped, WORK / f"models/smollm2-{precision}.gguf", precision)
            for precision in ("fp32", "bf16")
        }
        tokenizer = Tokenizer.from_folder(self._folder)
        self._text = tokenizer.encode((ROOT / "LICENSE").read_text())
        self.shape = ModelShape.from_folder(self._folder)
        self.samples: list[dict[str, Any]] = []
        self.losses: list[dict[str, Any]] = []
        self.versions: dict[str, Any] = {}
        self.notes: dict[str, str] = {}
        self.streams: dict[tuple[str, Case], list[list[int]]] = {}
        self._serial = 0

    def run(self, cases: Sequence[Case], progress: Progress) -> None:
        """One warm-up round that is not kept, then the rounds."""
        with ExitStack() as stack:
            workers = {
                (system, precision): stack.enter_context(self._start(system, precision))
                for system, precision in dict.fromkeys(
                    (system, case.precision) for case in cases for system in _systems(case)
                )
            }
            for (system, _), worker in workers.items():
                described = worker.ask("describe")
                self.versions[system] = described["versions"]
                self.notes[system] = described["notes"]
            label = "train" if cases[0].is_training else "infer"
            tasks = list(self._tasks(cases))
            for number, case, system in progress.track(tasks, label, total=len(tasks), unit="runs"):
                worker = workers[OURS if system == RAW else system, case.precision]
                self._measure(worker, case, system=system, number=number)

    def measure_machine(self) -> dict[str, Any]:
        sizes = {name: self.shape.weight_bytes(name) for name in ELEMENT_BYTES}
        with self._worker("machine_worker", Path(sys.executable), "fp32") as worker:
            return worker.ask("limits", weight_bytes=sizes)

    def agreement(self) -> list[dict[str, Any]]:
        """How far the peers' greedy streams are ours, at the largest batch of each precision."""
        entries = []
        for (system, case), streams in self.streams.items():
            if system in (OURS, RAW) or case.precision == "q4_1":
                continue
            if case.batch == max(self._options.batches):
                ours = self.streams[OURS, case]
                prefixes = [_common_prefix(a, b) for a, b in zip(ours, streams, strict=True)]
                entries.append(
                    {
                        "system": system,
                        "precision": case.precision,
                        "streams": len(prefixes),
                        "identical": prefixes.count(case.generated_tokens),
                        "mean_common_tokens": sum(prefixes) / len(prefixes),
                    }
                )
        return entries

    def _tasks(self, cases: Sequence[Case]) -> Iterator[tuple[int, Case, str]]:
        """Round 0 is the warm-up. Neighbours are one case measured in different systems."""
        for number in range(self._options.rounds + 1):
            for case in cases:
                systems = _systems(case)
                if self._options.raw and case.kind == "decode" and OURS in systems:
                    systems = [*systems, RAW]
                turn = number % len(systems)
                for system in systems[turn:] + systems[:turn]:
                    yield number, case, system

    def _measure(self, worker: Worker, case: Case, *, system: str, number: int) -> None:
        if case.kind == "prefill":
            self._serial += 1
            answer = worker.ask("prefill", prompt=prefill_prompt(self._text, self._serial))
        elif case.kind == "decode":
            answer = worker.ask(
                "decode_raw" if system == RAW else "decode",
                prompts=decode_prompts(self._text, case.batch),
                num_generated=case.generated_tokens if number else WARM_UP_TOKENS,
            )
            self.streams[system, case] = answer["token_ids"]
        else:
            answer = worker.ask("sft", method=case.kind, documents=sft_documents(self._text))
        kept = {"title": case.title, "precision": case.precision, "system": system, "round": number}
        if "loss" in answer:
            self.losses.append(kept | {"loss": answer["loss"]})
        if number > 0:
            times = {name: answer[name] for name in ("num_tokens", "seconds")}
            self.samples.append(asdict(case) | kept | times)

    def _start(self, system: str, precision: str) -> Worker:
        python = Path(sys.executable) if system == OURS else PEER_PYTHON
        return self._worker(SCRIPTS[system], python, precision)

    def _worker(self, script: str, python: Path, precision: str) -> Worker:
        return Worker(
            script,
            python=python,
            model=self._gguf[precision] if script == "llama_cpp_worker" else self._folder,
            precision=precision,
            threads=self._options.threads,
            log=WORK / f"logs/{script}-{precision}.log",
        )


def _systems(case: Case) -> list[str]:
    if case.precision == "q4_1":
        return ["llama.cpp"]
    return [name for name in SCRIPTS if not (case.is_training and name == "llama.cpp")]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=True))
    return next((index for index, (x, y) in pairs if x != y), len(a))


def _highest(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    return {kind: {name: max(a[kind][name], b[kind][name]) for name in a[kind]} for kind in a}


def run_bench(options: Options) -> dict[str, Any]:
    """The whole run as the JSON that is written."""
    start = perf_counter()
    bench = Bench(options)
    inference = [c for c in inference_cases() if c.kind == "prefill" or c.batch in options.batches]
    training = [Case(kind=method, precision="bf16") for method in options.sft]
    machine = bench.measure_machine()
    with Progress() as progress:
        bench.run(inference, progress)
        if training:
            bench.run(training, progress)
    machine = _highest(machine, bench.measure_machine())
    limits = {
        f"{case.title}, {case.precision}": limit_tokens_per_s(case, bench.shape, machine)
        for case in [*inference, *training]
    }
    return {
        "model": "SmolLM2-135M-Instruct",
        "date": date.today().isoformat(),
        "git": git_revision(ROOT),
        "hardware": as_json(detect_hardware()),
        "versions": bench.versions,
        "notes": bench.notes,
        "threads": options.threads,
        "rounds": options.rounds,
        "seed": SEED,
        "machine": machine,
        "limits_tokens_per_s": limits,
        "agreement": bench.agreement(),
        "losses": bench.losses,
        "seconds": perf_counter() - start,
        "samples": bench.samples,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="1 round, no 32 streams, no SFT")
    parser.add_argument("--raw", action="store_true", help="measure our model without the engine")
    parser.add_argument("--full-sft", action="store_true", help="full fine-tuning beside LoRA")
    parser.add_argument("--out", type=Path, default=RESULT, help="the JSON to write")
    parser.add_argument("--show", action="store_true", help="measure nothing; show --out again")
    parser.add_argument("--markdown", action="store_true", help="put the table into README.md")
    args = parser.parse_args()
    if not args.show:
        if not PEER_PYTHON.exists():
            sys.exit(f"{PEER_PYTHON} is missing; `make bench` makes it")
        options = Options(
            rounds=1 if args.quick else args.rounds,
            threads=args.threads,
            batches=(1, 8) if args.quick else (1, 8, 32),
            sft=() if args.quick else ("lora", "full") if args.full_sft else ("lora",),
            raw=args.raw,
        )
        result = run_bench(options)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    result = load_result(args.out)
    Console(width=160).print(terminal_table(result))
    print("\n".join(["", *result["notes"].values()]), f"{result['seconds'] / 60:.1f} minutes")
    if args.markdown:
        write_between_markers(ROOT / "README.md", markdown(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
