"""From a task's name to its environment: the one list of what there is."""

from __future__ import annotations

from pathlib import Path

from lockstep.core.errors import ConfigError
from lockstep.evaluate.free_answer import FreeAnswerSource
from lockstep.evaluate.reasoning_gym_source import ReasoningGymSource
from lockstep.evaluate.single_turn import SingleTurnEnvironment, Source, TaskConfig

_FORMS = "reasoning_gym:NAME[:key=value,...] or free_answer:FILE"


def load_environment(spec: str, config: TaskConfig | None = None) -> SingleTurnEnvironment:
    """The environment called `spec`, posed and graded as `config` says."""
    config = config or TaskConfig()
    kind, _, rest = spec.partition(":")
    source: Source
    if not rest:
        raise ConfigError(f"task {spec!r} is not of the form {_FORMS}")
    if kind == "reasoning_gym":
        source = ReasoningGymSource(rest)
    elif kind == "free_answer":
        source = FreeAnswerSource(Path(rest), config.match)
    else:
        raise ConfigError(f"task kind {kind!r} is unknown; use {_FORMS}")
    return SingleTurnEnvironment(source, config)
