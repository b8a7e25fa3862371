"""The road itself: fetch, measure, SFT, measure, RL, measure, serve, compare, shut down.

runs/demo/
    config.json, environment.json, metrics.jsonl (a line a phase)
    measurements/{base,sft,rl}/{task,choices}/   folders that `lockstep eval compare` reads
    sft/, rl/                                    runs, as their own commands leave them
    server/                                      its log, and every answer with its logprobs
    summary.json                                 the numbers of the table and the report
    report.html
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lockstep.core.errors import ConfigError
from lockstep.core.files import write_json
from lockstep.core.progress import Progress
from lockstep.core.run_folder import RunFolder, as_json
from lockstep.demo.config import DemoConfig
from lockstep.demo.measuring import CHOICES, TASK, Measured, load_trained, measure_model
from lockstep.demo.outcome import SUMMARY, Outcome, check_promises, first_ratios, speed
from lockstep.demo.phases import Phases
from lockstep.demo.report import write_report
from lockstep.demo.serving import Served, serve_and_compare
from lockstep.evaluate.compare import Comparison, compare_folders
from lockstep.models import LoadedModel, load_model
from lockstep.models.resolve import resolve_model
from lockstep.rl.run import RLRun
from lockstep.train.sft import SFTRun

NUM_PHASES = 9
KIND = "lockstep demo"
PAIRS = (("base", "sft"), ("sft", "rl"), ("base", "rl"))


def run_demo(config: DemoConfig, out: Path) -> Outcome:
    """Walk the road and leave everything in `out`, in the place of an earlier demo there."""
    has_replaced = make_room(out)
    with RunFolder(out) as folder:
        folder.write_config({"kind": KIND, "settings": config})
        folder.write_environment()
        phases = Phases(folder, total=NUM_PHASES)
        if has_replaced:
            phases.say(f"replacing the earlier demo in {out}")
        road = _Road(config, out, phases)
        sft, adapter = road.train()
        served = serve_and_compare(config, phases, out / "server", model=sft, adapter=adapter)
        outcome = road.judge(served)
    write_json(out / SUMMARY, as_json(outcome))
    write_report(out)
    return outcome


def make_room(out: Path) -> bool:
    """Remove an earlier demo from `out`, and nothing else; says whether there was one."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not _is_demo(out / "config.json"):
        raise ConfigError(f"{out} exists and holds no demo; choose another folder with --out")
    shutil.rmtree(out)
    return True


def _is_demo(config: Path) -> bool:
    try:
        settings = json.loads(config.read_text())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and settings.get("kind") == KIND


class _Road:
    """Training and measuring; each phase leaves its files in `out`."""

    def __init__(self, config: DemoConfig, out: Path, phases: Phases) -> None:
        self._config = config
        self._out = out
        self._phases = phases
        self._measured: dict[str, Measured] = {}

    def train(self) -> tuple[Path, Path]:
        """From the checkpoint to the SFT model's folder and the RL adapter that goes on it."""
        config, phase = self._config, self._phases.phase
        with phase("Fetch", f"{config.model} (downloaded once, then kept)"):
            self._phases.say(f"{resolve_model(config.model).path}")
        with phase("Measure the base model", self._what_is_measured()):
            self._measure("base", load_model(config.model, precision=config.precision))
        with phase("SFT (LoRA)", f"conversations of {config.sft_data.name}"):
            sft = self._fine_tune()
        with phase("Measure after SFT", self._what_is_measured()):
            self._measure("sft", load_model(sft, precision=config.precision))
        with phase("RL (GRPO)", f"rewards from the task's verifier, {config.rl_steps} steps"):
            adapter = self._reinforce(sft)
        with phase("Measure after RL", self._what_is_measured()):
            self._measure("rl", load_trained(sft, adapter, config))
        return sft, adapter

    def judge(self, served: Served) -> Outcome:
        """Paired tests, rates and checks, from the files the phases left."""
        task = {f"{a}_{b}": self._compare(a, b, TASK) for a, b in PAIRS}
        choices = {f"{a}_{b}": self._compare(a, b, CHOICES) for a, b in PAIRS}
        ratios = first_ratios(self._out / "rl")
        return Outcome(
            measured=self._measured,
            comparisons=task,
            choices=choices,
            first_ratios=ratios,
            agreement=served.agreement,
            streamed=served.streamed,
            server_exit_code=served.exit_code,
            speed=speed(
                self._out / "sft",
                self._out / "rl",
                server_tokens_per_s=served.tokens_per_s,
                first_token_s=served.streamed.first_token_s,
            ),
            phase_seconds=self._phases.seconds,
            total_s=self._phases.total_s,
            checks=check_promises(
                improvement=task["sft_rl"],
                regression=choices["base_rl"],
                ratios=ratios,
                agreement=served.agreement,
                exit_code=served.exit_code,
                significance=self._config.significance,
            ),
        )

    def _what_is_measured(self) -> str:
        return f"{self._config.num_items} held-out items of the task, and common knowledge"

    def _measure(self, name: str, loaded: LoadedModel) -> None:
        measured = measure_model(loaded, self._config, self._out / "measurements" / name)
        self._measured[name] = measured
        for what, summary in (("held-out", measured.task), ("multiple choice", measured.choices)):
            accuracy = summary.accuracy
            self._phases.say(
                f"{what} accuracy {accuracy.mean:.1%} "
                f"({accuracy.low:.1%} to {accuracy.high:.1%}, {accuracy.num_items} items)"
            )

    def _fine_tune(self) -> Path:
        run = SFTRun(self._config.sft(self._out / "sft"))
        for line in run.describe():
            self._phases.say(line)
        with Progress() as progress:
            return run.train(progress=progress).model_folder

    def _reinforce(self, model: Path) -> Path:
        run = RLRun(self._config.rl(model, self._out / "rl"))
        for line in run.describe():
            self._phases.say(line)
        with Progress() as progress:
            adapter = run.train(progress=progress).adapter_folder
        assert adapter is not None, "the demo trains an adapter"
        return adapter

    def _compare(self, before: str, after: str, what: str) -> Comparison:
        folder = self._out / "measurements"
        return compare_folders(folder / before / what, folder / after / what)
