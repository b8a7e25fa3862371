"""The state of a training run (weights, optimizer, step count) and its one owner.

SFT and RL both drive it: they choose the micro-batches and the loss, it updates, saves and resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.models.llama import Llama
from lockstep.train import checkpoint
from lockstep.train.config import OptimizerConfig, ScheduleConfig
from lockstep.train.optimizer import (
    build_optimizer,
    learning_rate_at,
    set_learning_rate,
)
from lockstep.train.packing import MicroBatch
from lockstep.train.step import LossFn, StepMetrics, train_step


class Trainer:
    """Updates `model` in place; `step` counts finished updates."""

    def __init__(
        self,
        model: Llama,
        *,
        optimizer: OptimizerConfig,
        schedule: ScheduleConfig,
        num_steps: int,
    ) -> None:
        self.model = model
        self.num_steps = num_steps
        self.step = 0
        self._config = optimizer
        self._schedule = schedule
        self._optimizer = build_optimizer(model, optimizer)

    @property
    def learning_rate(self) -> float:
        """Rate of the next update."""
        return learning_rate_at(
            self.step,
            peak=self._config.learning_rate,
            num_steps=self.num_steps,
            schedule=self._schedule,
        )

    def update(
        self, micro_batches: Sequence[MicroBatch], loss_fn: LossFn, *, normaliser: float
    ) -> StepMetrics:
        """One optimizer step on the gradient of `sum(loss_fn totals) / normaliser`."""
        set_learning_rate(self._optimizer, self.learning_rate)
        metrics = train_step(
            self.model,
            self._optimizer,
            micro_batches,
            loss_fn,
            normaliser=normaliser,
            max_grad_norm=self._config.max_grad_norm,
        )
        self.step += 1
        return metrics

    def save(
        self, root: Path, *, state: Mapping[str, Any], config: Mapping[str, Any], keep: int = 2
    ) -> Path:
        """Checkpoint after `step` updates; `state` is what the caller needs to continue."""
        return checkpoint.save(
            root,
            step=self.step,
            model=self.model,
            optimizer=self._optimizer,
            state=state,
            config=config,
            keep=keep,
        )

    def resume(
        self,
        root: Path,
        *,
        config: Mapping[str, Any],
        may_differ: Sequence[str] = (),
        on_message: Callable[[str], None] = print,
    ) -> dict[str, Any] | None:
        """Continue from the newest undamaged checkpoint and return its `state`, or None."""
        checkpoint.clean_up(root)
        folder = checkpoint.latest(root, on_message=on_message)
        if folder is None:
            return None
        restored = checkpoint.load(
            folder,
            model=self.model,
            optimizer=self._optimizer,
            config=config,
            may_differ=may_differ,
        )
        self.step = restored.step
        return restored.state
