"""The items a run is measured on, and must therefore never train on."""

from __future__ import annotations

from pathlib import Path

from lockstep.core.completer import Completer
from lockstep.core.environment import Environment, TaskItem
from lockstep.core.errors import ConfigError
from lockstep.evaluate.generation import GenerationConfig, evaluate_generation, select_items
from lockstep.evaluate.results import Summary, summarise, write_results
from lockstep.evaluate.tasks import load_environment
from lockstep.rl.config import RLConfig


class HeldOut:
    """Greedy measurements on held-out items, written into the run's folder."""

    def __init__(self, config: RLConfig, environment: Environment) -> None:
        self._folder: Path = config.out / "evaluations"
        self._model_name = config.model
        self._environment = environment
        if config.eval_task:
            self._environment = load_environment(config.eval_task, config.posing)
        elif config.loop.eval_every and not environment.has_held_out:
            raise ConfigError(
                f"{environment.name} has no held-out part; give --eval-task with other items, "
                "or --eval-every 0"
            )
        self._config = GenerationConfig(
            num_items=config.loop.eval_items,
            seed=config.loop.eval_seed,
            max_tokens=config.rollout.max_tokens,
        )
        self._items: list[TaskItem] = []
        if config.loop.eval_every:
            self._items = select_items(self._environment, self._config)
        self._num_excluded = config.loop.held_out_items

    def excluded(self) -> list[TaskItem]:
        """Items whose prompts must not occur in training."""
        if not self._environment.has_held_out:
            return self._items
        num = min(max(self._num_excluded, len(self._items)), self._environment.num_items)
        seed = self._config.seed
        return [self._environment.item(i, split="held_out", seed=seed) for i in range(num)]

    def measure(self, policy: Completer, *, step: int) -> Summary:
        """The policy as it is after `step` steps."""
        results = evaluate_generation(policy, self._environment, self._items, self._config)
        summary = summarise(results, task=self._environment.name, model=self._model_name)
        write_results(self._folder / f"step-{step:05d}", results, summary)
        return summary
