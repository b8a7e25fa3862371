"""Reward functions in TRL's style, built in or from a user's file.

A verifier takes `(prompts, completions, **columns)` and returns one float, or None for "not mine to
judge", for each completion. The columns are `answer` (the reference), `extracted` (the answer found
in the completion, or None), `score` (the task's own, in [0, 1]), `item_id` and `metadata`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.core.environment import Verifier
from lockstep.core.errors import ConfigError


def correct(
    prompts: Sequence[object], completions: Sequence[str], *, score: Sequence[float], **_: Any
) -> list[float | None]:
    """1 for a fully right answer, else 0: leaves no partial credit to be gamed."""
    return [1.0 if value >= 1.0 else 0.0 for value in score]


def graded(
    prompts: Sequence[object], completions: Sequence[str], *, score: Sequence[float], **_: Any
) -> list[float | None]:
    """The task's own score, partial credit included."""
    return list(score)


def answered(
    prompts: Sequence[object],
    completions: Sequence[str],
    *,
    extracted: Sequence[str | None],
    **_: Any,
) -> list[float | None]:
    """1 if an answer could be extracted at all: a reward for the format."""
    return [0.0 if answer is None else 1.0 for answer in extracted]


BUILT_IN: Mapping[str, Verifier] = {"correct": correct, "graded": graded, "answered": answered}


def load_verifiers(weights: Mapping[str, float]) -> dict[str, tuple[Verifier, float]]:
    """Verifiers by name with their weights; a name is one of `BUILT_IN` or `FILE.py:FUNCTION`."""
    if not weights:
        raise ConfigError(f"no reward given; name at least one of {', '.join(BUILT_IN)}")
    return {name: (_find(name), weight) for name, weight in weights.items()}


def parse_weights(texts: Sequence[str]) -> dict[str, float]:
    """`NAME` (weight 1) or `NAME=WEIGHT`, as a command line gives them."""
    weights = {}
    for text in texts:
        name, equals, weight = text.rpartition("=")
        try:
            weights[name if equals else text] = float(weight) if equals else 1.0
        except ValueError:
            raise ConfigError(f"reward {text!r}: {weight!r} is not a weight") from None
    return weights


def _find(name: str) -> Verifier:
    if name in BUILT_IN:
        return BUILT_IN[name]
    path, _, function = name.rpartition(":")
    if not path.endswith(".py"):
        raise ConfigError(
            f"reward {name!r} is unknown; use {', '.join(BUILT_IN)} or FILE.py:FUNCTION"
        )
    if not Path(path).is_file():
        raise ConfigError(f"reward {name!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"lockstep_reward_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    verifier = getattr(module, function, None)
    if not callable(verifier):
        raise ConfigError(f"reward {name!r}: {path} defines no function {function!r}")
    return verifier  # type: ignore[no-any-return]
