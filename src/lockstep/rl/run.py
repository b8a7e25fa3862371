"""Reinforcement learning with verifiable rewards; trainer and engine share one process and model.

    run folder/
        config.json, environment.json, metrics.jsonl
        trajectories/step-<n>              every rollout, enough to draw each token again
        evaluations/step-<n>/              greedy measurements on held-out items
        checkpoints/checkpoint-<updates>/  what resuming continues from, to the same bits
        adapter/, model/                   the LoRA adapter (PEFT), the merged Hugging Face folder

A step: draw rollouts, grade them, update. Prompts and noise are functions of (seed, step), and the
engine runs the trainer's own weights on the same kernels, so the logprobs recorded at sampling are
the old logprobs. Omitted: rollouts that are older than one step, and several turns.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError
from lockstep.core.progress import Progress, Task
from lockstep.core.records import Trajectory
from lockstep.core.run_folder import RunFolder, as_json
from lockstep.core.sampling import SamplingParams
from lockstep.engine import Engine, EngineCompleter
from lockstep.evaluate.results import Summary
from lockstep.evaluate.tasks import load_environment
from lockstep.models.export import save_adapter, save_hf_folder
from lockstep.models.lora import merge_lora
from lockstep.rl.batch import TrainingBatch, make_batch
from lockstep.rl.config import RLConfig
from lockstep.rl.held_out import HeldOut
from lockstep.rl.loss import PolicyLoss
from lockstep.rl.metrics import (
    batch_metrics,
    first_ratio_metrics,
    rollout_metrics,
    update_metrics,
)
from lockstep.rl.policy import load_policy, load_reference
from lockstep.rl.prompts import PromptSource
from lockstep.rl.rollouts import roll_out
from lockstep.rl.trajectory_files import write_trajectories
from lockstep.train.checkpoint import fingerprint_frozen
from lockstep.train.packing import pack
from lockstep.train.trainer import Trainer

MAY_DIFFER_ON_RESUME = (
    "settings.out",
    "settings.rollout.trajectory_format",
    "settings.loop.activation_checkpointing",
    "settings.loop.recompute_mlp",
    "settings.loop.eval_every",
    "settings.loop.eval_items",
    "settings.loop.save_every",
    "settings.loop.keep",
)
"""Settings that cannot change the weights."""


@dataclass(frozen=True, kw_only=True)
class RLResult:
    """What a finished run left; paths are inside its folder."""

    num_steps: int
    first_evaluation: Summary | None
    last_evaluation: Summary | None
    model_folder: Path
    adapter_folder: Path | None


class RLRun:
    """A run that is ready to start: model loaded, task checked, nothing written."""

    def __init__(self, config: RLConfig) -> None:
        self.config = config
        self._environment = load_environment(config.task, config.posing)
        self._held_out = HeldOut(config, self._environment)
        self._prompts = PromptSource(
            self._environment, seed=config.loop.seed, held_out=self._held_out.excluded()
        )
        self.loaded = load_policy(config)
        self._reference = load_reference(config, self.loaded.model)
        self._trainer = Trainer(
            self.loaded.model,
            optimizer=config.optimizer,
            schedule=config.schedule,
            num_steps=config.loop.steps * config.algorithm.updates_per_rollout,
        )
        self.engine = Engine(self.loaded.model, self.loaded.tokenizer)
        self._policy = EngineCompleter(self.engine, model_name=self.loaded.name)
        self._first_evaluation: Summary | None = None
        self._last_evaluation: Summary | None = None
        self._num_tokens = 0
        self._has_warned = False

    def describe(self) -> list[str]:
        """What the run will do, in lines for the user."""
        weights = list(self.loaded.model.parameters())
        trainable = sum(weight.numel() for weight in weights if weight.requires_grad)
        rollout, algorithm = self.config.rollout, self.config.algorithm
        kl = f", KL {algorithm.kl_estimator} x {algorithm.kl_beta:g}" if algorithm.kl_beta else ""
        return [
            f"model: {self.loaded.name}, {trainable:,} of "
            f"{sum(weight.numel() for weight in weights):,} parameters trainable, "
            f"{self.config.precision} compute",
            f"task: {self._environment.name}",
            f"steps: {self.config.loop.steps:,} of {rollout.prompts_per_step} prompts x "
            f"{rollout.samples_per_prompt} samples of at most {rollout.max_tokens} tokens, "
            f"temperature {rollout.temperature:g}",
            f"loss: {algorithm.loss}, advantages {algorithm.estimator}{kl}",
        ]

    def train(self, *, resume: bool = False, progress: Progress | None = None) -> RLResult:
        """Train to the end, and export. `resume` continues a run that stopped, wherever it did."""
        progress = progress or Progress(quiet=True)
        num_steps = self.config.loop.steps
        with RunFolder(self.config.out) as folder:
            start = self._open(folder, resume=resume, progress=progress)
            bar = progress.add("RL", total=num_steps, unit="steps")
            bar.advance(start)
            for step in range(start, num_steps):
                row = self._step(step)
                if self._is_due(step, self.config.loop.eval_every):
                    row |= self._evaluate(step + 1)
                folder.append_metrics(row)
                if self._is_due(step, self.config.loop.save_every):
                    self._save(step + 1)
                if row["sampling/num_mismatches"] and not self._has_warned:
                    self._has_warned = True
                    progress.say(f"warning: step {step + 1}: {_mismatch(row)}")
                _advance(bar, row)
            bar.finish()
        return self._export()

    def _step(self, step: int) -> dict[str, Any]:
        """Rollouts, rewards, updates; returns the step's row of metrics."""
        started_s = time.perf_counter()
        learning_rate = self._trainer.learning_rate
        trajectories = self._roll_out(step)
        rolled_out_s = time.perf_counter()
        batch = make_batch(
            trajectories, self.config.algorithm, max_tokens=self.config.rollout.max_tokens
        )
        row = self._update(batch)
        self.engine.weights_updated(self._trainer.step)
        write_trajectories(
            self.config.out / "trajectories",
            step,
            trajectories,
            format=self.config.rollout.trajectory_format,
        )
        self._num_tokens += sum(len(trajectory.token_ids) for trajectory in trajectories)
        finished_s = time.perf_counter()
        return {
            "step": step + 1,
            **rollout_metrics(trajectories),
            **batch_metrics(batch),
            **row,
            "learning_rate": learning_rate,
            "num_tokens": self._num_tokens,
            "step_time": finished_s - started_s,
            "time/rollout": rolled_out_s - started_s,
            "time/update": finished_s - rolled_out_s,
        }

    def _roll_out(self, step: int) -> list[Trajectory]:
        items = self._prompts.batch(step, num_prompts=self.config.rollout.prompts_per_step)
        return roll_out(
            self._policy,
            self._environment,
            items,
            self.config.rollout,
            seed=self.config.loop.seed,
            step=step,
        )

    def _update(self, batch: TrainingBatch) -> dict[str, float]:
        """`updates_per_rollout` optimizer steps on one batch; the first is on-policy."""
        micro_batches = pack(batch.documents, max_tokens=self.config.loop.micro_batch_tokens)
        temperature = self.config.rollout.temperature
        first: dict[str, float] = {}
        updates = []
        for number in range(self.config.algorithm.updates_per_rollout):
            loss = PolicyLoss(
                self.config.algorithm,
                inverse_temperature=SamplingParams(temperature=temperature).inverse_temperature,
                is_on_policy=number == 0,
                reference=self._reference,
            )
            updates.append(self._trainer.update(micro_batches, loss, normaliser=batch.normaliser))
            first = first or first_ratio_metrics(loss, updates[0])
        return update_metrics(updates) | first

    def _evaluate(self, step: int) -> dict[str, float]:
        """Greedy accuracy on the held-out items, with the weights as they are."""
        summary = self._held_out.measure(self._policy, step=step)
        self._first_evaluation = self._first_evaluation or summary
        self._last_evaluation = summary
        return {
            "eval/accuracy": summary.accuracy.mean,
            "eval/accuracy_low": summary.accuracy.low,
            "eval/accuracy_high": summary.accuracy.high,
            "eval/mean_length": summary.mean_completion_tokens,
        }

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and ((step + 1) % every == 0 or step + 1 == self.config.loop.steps)

    def _open(self, folder: RunFolder, *, resume: bool, progress: Progress) -> int:
        """Start a new run in `folder` or go to where its last checkpoint is; the next step."""
        if folder.config_path.exists() and not resume:
            raise ConfigError(
                f"{folder.path} already holds a run; pass --resume to continue it, or another --out"
            )
        state = self._trainer.resume(
            folder.path / "checkpoints",
            config=self._identity,
            may_differ=self._may_differ(),
            on_message=progress.say,
        )
        start = 0
        if state is not None:
            start, self._num_tokens = state["num_steps"], state["num_tokens"]
            self.engine.weights_updated(self._trainer.step)
            progress.say(f"resuming after step {start}")
        folder.rewind(before_step=start + 1 if start else 0)
        folder.write_config(self.config)
        folder.write_environment()
        if start == 0 and self.config.loop.eval_every:
            folder.append_metrics({"step": 0, **self._evaluate(0)})
        return start

    def _save(self, num_steps: int) -> None:
        self._trainer.save(
            self.config.out / "checkpoints",
            state={"num_steps": num_steps, "num_tokens": self._num_tokens},
            config=self._identity,
            keep=self.config.loop.keep,
        )

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What must be the same for a checkpoint to be one of this run."""
        return {
            "settings": as_json(self.config),
            "frozen_weights_sha256": fingerprint_frozen(self.loaded.model),
        }

    def _may_differ(self) -> tuple[str, ...]:
        if self.config.schedule.lr_schedule == "constant":  # the length does not shape the rate
            return (*MAY_DIFFER_ON_RESUME, "settings.loop.steps")
        return MAY_DIFFER_ON_RESUME

    def _export(self) -> RLResult:
        loaded, config = self.loaded, self.config
        adapter_folder = None
        if config.lora is not None:
            adapter_folder = config.out / "adapter"
            save_adapter(loaded.model, adapter_folder, config.lora, base_model=str(loaded.folder))
            merge_lora(loaded.model)
        model_folder = config.out / "model"
        save_hf_folder(
            loaded.model,
            model_folder,
            tokenizer=loaded.tokenizer,
            generation_config=loaded.generation_config,
            dtype="float32" if config.precision == "fp32" else "bfloat16",
            quiet=True,
        )
        return RLResult(
            num_steps=config.loop.steps,
            first_evaluation=self._first_evaluation,
            last_evaluation=self._last_evaluation,
            model_folder=model_folder,
            adapter_folder=adapter_folder,
        )


def _mismatch(row: dict[str, Any]) -> str:
    return (
        f"{row['sampling/num_mismatches']:.0f} first ratios are not 1 but up to "
        f"{row['sampling/max_ratio_deviation']:.3g} away; training goes on as on_mismatch says"
    )


def _advance(bar: Task, row: dict[str, Any]) -> None:
    note = f"reward {row['reward']:.3f}, {row['completions/mean_length']:.1f} tokens"
    if "eval/accuracy" in row:
        note += f", held-out accuracy {row['eval/accuracy']:.3f}"
    bar.advance(note=note)
