"""One measurement from beginning to end: ask, grade, summarise, write down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from lockstep.core.completer import Completer
from lockstep.core.environment import Environment
from lockstep.evaluate.generation import GenerationConfig, evaluate_generation, select_items
from lockstep.evaluate.multiple_choice import evaluate_choices, read_choice_items
from lockstep.evaluate.prompts import PromptConfig
from lockstep.evaluate.results import ItemResult, Summary, summarise, write_results

OnFinish = Callable[[int], None]


class Measurement(Protocol):
    """Items that are ready to be posed; making one checks everything that needs no model."""

    @property
    def name(self) -> str: ...

    @property
    def num_items(self) -> int: ...

    def results(
        self, completer: Completer, *, on_finish: OnFinish | None = None
    ) -> list[ItemResult]: ...


class GenerationMeasurement:
    """The model answers in its own words."""

    def __init__(self, environment: Environment, config: GenerationConfig) -> None:
        self._environment = environment
        self._config = config
        self.items = select_items(environment, config)

    @property
    def name(self) -> str:
        return self._environment.name

    @property
    def num_items(self) -> int:
        return len(self.items)

    def results(
        self, completer: Completer, *, on_finish: OnFinish | None = None
    ) -> list[ItemResult]:
        return evaluate_generation(
            completer, self._environment, self.items, self._config, on_finish=on_finish
        )


class ChoiceMeasurement:
    """The model's answer is the choice it finds most likely."""

    def __init__(self, path: Path, num_items: int | None, prompt: PromptConfig) -> None:
        self._items = read_choice_items(path, num_items)
        self._prompt = prompt
        self.name = f"multiple_choice:{path.name}"

    @property
    def num_items(self) -> int:
        return len(self._items)

    def results(
        self, completer: Completer, *, on_finish: OnFinish | None = None
    ) -> list[ItemResult]:
        return evaluate_choices(completer, self._items, self._prompt, on_finish=on_finish)


def measure(
    measurement: Measurement,
    completer: Completer,
    folder: Path,
    *,
    on_finish: OnFinish | None = None,
) -> Summary:
    """Pose every item, and leave results.jsonl and summary.json in `folder`."""
    results = measurement.results(completer, on_finish=on_finish)
    summary = summarise(results, task=measurement.name, model=completer.model_name)
    write_results(folder, results, summary)
    return summary
