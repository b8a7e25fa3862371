"""The items a run is measured on, and must therefore never train on."""

from __future__ import annotations

from pathlib import Path

from lockstep.core.completer import Completer
from lockstep.core.environment import Environment, TaskItem
from lockstep.core.errors import ConfigError
from lockstep.evaluate.generation import GenerationConfig
from lockstep.evaluate.measurement import GenerationMeasurement, measure
from lockstep.evaluate.results import Summary
from lockstep.evaluate.tasks import load_environment
from lockstep.rl.config import RLConfig


class HeldOut:
    """Greedy measurements on held-out items, written into the run's folder."""

    def __init__(self, config: RLConfig, environment: Environment) -> None:
        self._folder: Path = config.out / "evaluations"
        self._environment = environment
        if config.eval_task:
            self._environment = load_environment(config.eval_task, config.posing)
        elif config.loop.eval_every and not environment.has_held_out:
            raise ConfigError(
                f"{environment.name} has no held-out part; give --eval-task with other items, "
                "or --eval-every 0"
            )
        self._seed = config.loop.eval_seed
        self._num_excluded = config.loop.held_out_items
        self._measurement: GenerationMeasurement | None = None
        if config.loop.eval_every:
            self._measurement = GenerationMeasurement(
                self._environment,
                GenerationConfig(
                    num_items=config.loop.eval_items,
                    seed=config.loop.eval_seed,
                    max_tokens=config.rollout.max_tokens,
                ),
            )

    def excluded(self) -> list[TaskItem]:
        """Items whose prompts must not occur in training."""
        measured = self._measurement.items if self._measurement else []
        if not self._environment.has_held_out:
            return measured
        num = min(max(self._num_excluded, len(measured)), self._environment.num_items)
        return [self._environment.item(i, split="held_out", seed=self._seed) for i in range(num)]

    def measure(self, policy: Completer, *, step: int) -> Summary:
        """The policy as it is after `step` steps."""
        assert self._measurement is not None, "eval_every is 0: there is nothing to measure"
        return measure(self._measurement, policy, self._folder / f"step-{step:05d}")
