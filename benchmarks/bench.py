"""One run: the workers, what they are asked, and the samples.

Within a precision every system's worker lives through the whole run; each is stopped while another
is measured, rounds are interleaved and their order rotates. Memory and start-up are measured in
fresh processes; training in pairs of us and one peer, as more would not fit into memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from checkpoints import Checkpoints, ConversionError
from limits import ModelShape, limit_of, machine_of, step_bytes
from results import OURS
from systems import ROOT, WORK, System
from worker_loop import common_prefix
from worker_process import MissingError, Worker, WorkerError
from workload import (
    COMPARED_TOKENS,
    PROMPT_TOKENS,
    STARTUP_PROMPT_TOKENS,
    TTFT_TOKENS,
    WARM_UP_TOKENS,
    Case,
    Precision,
    cached_prompt,
    decode_prompts,
    fresh_prompt,
)

from lockstep.core.progress import Progress
from lockstep.text.tokenizer import Tokenizer

COMPARED_STREAMS = 8
Failures = (MissingError, WorkerError, ConversionError)


@dataclass(kw_only=True)
class Findings:
    """What a run has found so far, as it goes into the JSON."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    losses: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, str]] = field(default_factory=list)
    systems: dict[str, Any] = field(default_factory=dict)
    streams: dict[tuple[Precision, str], list[list[int]]] = field(default_factory=dict)


class Bench:
    """Measures cases in systems, for one model."""

    def __init__(self, model: str, systems: Sequence[System], *, rounds: int, threads: int) -> None:
        self._systems, self._rounds, self._threads = systems, rounds, threads
        self._checkpoints = Checkpoints(model)
        self._shape = ModelShape.from_folder(self._checkpoints.folder)
        tokenizer = Tokenizer.from_folder(self._checkpoints.folder)
        self._text = tokenizer.encode((ROOT / "LICENSE").read_text())
        self._serial = 0
        self.findings = Findings()

    def run(
        self, cases: Sequence[Case], progress: Progress, *, on_part: Callable[[], None]
    ) -> None:
        """All of them, by precision; `on_part` whenever another part is in the findings."""
        for precision in dict.fromkeys(case.precision for case in cases):
            mine = [case for case in cases if case.precision == precision]
            served = [c for c in mine if not c.is_training and c.kind not in ("memory", "startup")]
            if served:
                self._measure_serving(served, progress)
                on_part()
            if any(case.kind == "memory" for case in mine):
                self._measure_processes(precision, progress)
                on_part()
            for case in mine:
                if case.is_training:
                    self._measure_training(case, progress)
                    on_part()

    def machine(self, cases: Sequence[Case]) -> dict[str, Any]:
        """The machine's limits for these cases."""
        sizes = sorted({size for case in cases if (size := step_bytes(case, self._shape))})
        shapes = sorted(set(self._shape.linears_kn.values()))
        with self._worker("machine_worker", Path(sys.executable), Path(), "fp32") as worker:
            return worker.ask("limits", sizes=sizes, shapes_kn=shapes)

    def limits(self, cases: Sequence[Case], machine: dict[str, Any]) -> dict[str, float]:
        """By the key of the case, those that have one."""
        found = {case.key: limit_of(case, self._shape, machine_of(machine)) for case in cases}
        return {key: limit for key, limit in found.items() if limit is not None}

    def agreement(self) -> list[dict[str, Any]]:
        """How far the peers' greedy streams are ours, of the same precision."""
        entries = []
        for (precision, system), streams in self.findings.streams.items():
            ours = self.findings.streams.get((precision, OURS))
            if system == OURS or ours is None:
                continue
            pairs = zip(ours, streams, strict=True)
            common = [common_prefix(a[:COMPARED_TOKENS], b[:COMPARED_TOKENS]) for a, b in pairs]
            entries.append(
                {
                    "system": system,
                    "precision": precision,
                    "streams": len(common),
                    "identical": common.count(COMPARED_TOKENS),
                    "mean_common_tokens": sum(common) / len(common),
                }
            )
        return entries

    def _measure_serving(self, cases: Sequence[Case], progress: Progress) -> None:
        """One warm-up round that is not kept, then the rounds."""
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for system in self._systems:
                if any(map(system.measures, cases)):
                    worker = self._try_start(system, cases[0].precision)
                    if worker is not None:
                        workers[system.name] = stack.enter_context(worker)
            tasks = list(self._turns(cases, list(workers)))
            label = f"serve {cases[0].precision}"
            for number, case, name in progress.track(tasks, label, total=len(tasks), unit="runs"):
                if workers[name].has_ended:
                    continue
                try:
                    value = self._serve(workers[name], case, name, number)
                except WorkerError as error:
                    self._note_missing(name, case.precision, f"{case.title}: {error}")
                    continue
                if number > 0:
                    self._keep(case, name, number, value)

    def _serve(self, worker: Worker, case: Case, name: str, number: int) -> float:
        """The measured value, in the case's unit."""
        if case.kind == "decode":
            answer = worker.ask(
                "decode",
                prompts=decode_prompts(self._text, case),
                num_generated=case.generated_tokens if number else WARM_UP_TOKENS,
            )
            if case.batch == COMPARED_STREAMS:
                self.findings.streams[case.precision, name] = answer["token_ids"]
        else:
            self._serial += 1
            if case.cached_tokens:
                worker.ask("prefill", prompt=cached_prompt(self._text, self._serial, case))
                self._serial += 1
                prompt = cached_prompt(self._text, self._serial, case)
            else:
                prompt = fresh_prompt(self._text, self._serial, case.prompt_tokens)
            answer = worker.ask("prefill", prompt=prompt)
        if case.kind == "ttft":
            return float(answer["seconds"] * 1000)
        return float(answer["num_tokens"] / answer["seconds"])

    def _measure_processes(self, precision: Precision, progress: Progress) -> None:
        """Start-up and peak memory, each time in a process of its own; the first warms the files.

        The memory is that after a prompt of TTFT_TOKENS and 8 streams.
        """
        names = [s.name for s in self._systems if s.infers and precision in s.formats]
        memory, startup = (Case(kind=k, precision=precision) for k in ("memory", "startup"))
        streams = Case(
            kind="decode", precision=precision, batch=COMPARED_STREAMS, prompt_tokens=PROMPT_TOKENS
        )
        tasks = list(self._turns([startup], names))
        label = f"start {precision}"
        for number, _, name in progress.track(tasks, label, total=len(tasks), unit="runs"):
            worker = self._try_start(self._named(name), precision)
            if worker is None:
                continue
            with worker:
                try:
                    prompt = fresh_prompt(self._text, 0, STARTUP_PROMPT_TOKENS)
                    worker.ask("prefill", prompt=prompt)
                    seconds = perf_counter() - worker.started_s
                    worker.ask("prefill", prompt=fresh_prompt(self._text, 1, TTFT_TOKENS))
                    worker.ask(
                        "decode",
                        prompts=decode_prompts(self._text, streams),
                        num_generated=streams.generated_tokens,
                    )
                except WorkerError as error:
                    self._note_missing(name, precision, str(error))
                    continue
                if number > 0:
                    self._keep(startup, name, number, seconds)
                    self._keep(memory, name, number, worker.peak_rss_bytes / 1e6)

    def _measure_training(self, case: Case, progress: Progress) -> None:
        """A step a round, of the same documents everywhere; its first is the warm-up."""
        systems = [system for system in self._systems if system.measures(case)]
        ours = [system for system in systems if system.name == OURS]
        peers = [system for system in systems if system.name != OURS]
        for pair in [[*ours, peer] for peer in peers] or [ours]:
            with ExitStack() as stack:
                workers: dict[str, Worker] = {}
                for system in pair:
                    worker = self._try_start(system, case.precision, training=True)
                    if worker is not None:
                        workers[system.name] = stack.enter_context(worker)
                tasks = list(self._turns([case], list(workers)))
                label = f"train {case.kind} {case.precision}, {pair[-1].name}"
                for number, _, name in progress.track(tasks, label, total=len(tasks), unit="steps"):
                    if workers[name].has_ended:
                        continue
                    try:
                        answer = workers[name].ask("sft", method=case.kind, text=self._text)
                    except WorkerError as error:
                        self._note_missing(name, case.precision, f"{case.title}: {error}")
                        continue
                    self.findings.losses.append(
                        {
                            "key": case.key,
                            "system": name,
                            "beside": pair[-1].name,
                            "step": number,
                            "loss": answer["loss"],
                        }
                    )
                    if number > 0:
                        self._keep(case, name, number, answer["num_tokens"] / answer["seconds"])
                for name, worker in workers.items():
                    if not worker.has_ended:
                        peak = worker.peak_rss_bytes / 1e6
                        self._keep(case.memory_of_training(), name, self._rounds, peak)

    def _turns(
        self, cases: Sequence[Case], names: Sequence[str]
    ) -> Iterator[tuple[int, Case, str]]:
        """Round 0 is the warm-up. Neighbours are one case measured in different systems."""
        for number in range(self._rounds + 1):
            for case in cases:
                turn = number % max(len(names), 1)
                for name in [*names[turn:], *names[:turn]]:
                    yield number, case, name

    def _keep(self, case: Case, system: str, number: int, value: float) -> None:
        self.findings.samples.append(
            asdict(case) | {"system": system, "round": number, "value": value, "unit": case.unit}
        )

    def _try_start(
        self, system: System, precision: Precision, *, training: bool = False
    ) -> Worker | None:
        """None where the system does not run, which is then among the missing."""
        try:
            if not system.is_installed:
                raise MissingError(f"{system.python} is missing; make bench-peers makes it")
            worker = self._worker(
                system.script,
                system.python,
                self._checkpoints.of(system, precision),
                system.formats[precision],
                training=training,
            )
        except Failures as error:
            self._note_missing(system.name, precision, str(error))
            return None
        if system.name not in self.findings.systems:
            self.findings.systems[system.name] = worker.ask("describe")
        return worker

    def _note_missing(self, system: str, precision: Precision, reason: str) -> None:
        entry = {"system": system, "precision": precision, "reason": reason}
        if entry not in self.findings.missing:
            self.findings.missing.append(entry)

    def _named(self, name: str) -> System:
        return next(system for system in self._systems if system.name == name)

    def _worker(
        self, script: str, python: Path, model: Path, precision: str, *, training: bool = False
    ) -> Worker:
        return Worker(
            script,
            python=python,
            model=model,
            precision=precision,
            threads=self._threads,
            log=WORK / f"logs/{script}-{precision}.log",
            training=training,
        )
