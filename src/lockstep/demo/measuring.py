"""Measuring one model of the demo: greedy answers to the task, likelihoods of multiple choice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lockstep.core.progress import Progress, Task
from lockstep.demo.config import DemoConfig
from lockstep.engine import Engine, EngineCompleter
from lockstep.evaluate.measurement import (
    ChoiceMeasurement,
    GenerationMeasurement,
    Measurement,
    measure,
)
from lockstep.evaluate.results import Summary
from lockstep.evaluate.tasks import load_environment
from lockstep.models import LoadedModel, load_model
from lockstep.serve.loading import add_adapter

TASK, CHOICES = "task", "choices"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One model in numbers."""

    task: Summary
    choices: Summary


def load_trained(model: str | Path, adapter: Path, config: DemoConfig) -> LoadedModel:
    """A model with its adapter unmerged, as the trainer has it."""
    loaded = load_model(model, precision=config.precision)
    add_adapter(loaded, adapter)
    return loaded


def measure_model(loaded: LoadedModel, config: DemoConfig, folder: Path) -> Measured:
    """Both measurements, left in `folder`/task and `folder`/choices."""
    environment = load_environment(config.held_out_task or config.task, config.posing)
    measurements: dict[str, Measurement] = {
        TASK: GenerationMeasurement(environment, config.measured()),
        CHOICES: ChoiceMeasurement(config.choices, None, config.choices_prompt),
    }
    completer = EngineCompleter(Engine(loaded.model, loaded.tokenizer), model_name=loaded.name)
    summaries = {}
    with Progress() as progress:
        for name, measurement in measurements.items():
            bar = progress.add(
                "held-out items" if name == TASK else "multiple choice",
                total=measurement.num_items,
                unit="items",
            )
            summaries[name] = measure(
                measurement, completer, folder / name, on_finish=partial(_advance, bar)
            )
            bar.finish()
    return Measured(task=summaries[TASK], choices=summaries[CHOICES])


def _advance(bar: Task, _number: int) -> None:
    bar.advance()
