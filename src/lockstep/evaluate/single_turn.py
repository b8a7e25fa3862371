"""The environment of one question, one completion, one grade.

A `Source` supplies questions and judges answers; this class adds the prompt, the extraction of the
answer and the rewards, so that every kind of task is configured alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from lockstep.core.completer import Message
from lockstep.core.environment import Grade, Split, TaskItem, Turn
from lockstep.core.errors import DataError
from lockstep.evaluate.answers import Extraction, Match, extract_answer
from lockstep.evaluate.prompts import PromptConfig
from lockstep.evaluate.verifiers import load_verifiers

# What someone else's scoring code raises on text it did not expect.
SCORER_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """How a task is posed, and what its completions earn."""

    prompt: PromptConfig = field(default_factory=PromptConfig)
    extract: Extraction = "whole"
    """Where the answer is: the whole completion, inside its last answer tag, or its last number."""
    match: Match = "exact"
    """How a file's free answers are compared: exact (normalised text) or numeric."""
    rewards: Mapping[str, float] = field(default_factory=lambda: {"correct": 1.0})
    """Weight by verifier: correct, graded, answered or FILE.py:FUNCTION."""


class Source(Protocol):
    """Questions, and the judgement of an answer in [0, 1]."""

    @property
    def name(self) -> str: ...

    @property
    def has_held_out(self) -> bool: ...

    @property
    def num_items(self) -> int: ...

    def item(self, index: int, *, split: Split, seed: int) -> TaskItem:
        """The item with its bare question (text or messages) as prompt."""
        ...

    def score(self, answer: str | None, item: TaskItem) -> float: ...


class SingleTurnEnvironment:
    """A `lockstep.core.environment.Environment` over a Source."""

    max_turns = 1

    def __init__(self, source: Source, config: TaskConfig) -> None:
        self.source = source
        self.config = config
        self.verifiers = load_verifiers(config.rewards)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def has_held_out(self) -> bool:
        return self.source.has_held_out

    @property
    def num_items(self) -> int:
        return self.source.num_items

    def item(self, index: int, *, split: Split, seed: int = 0) -> TaskItem:
        if not 0 <= index < self.num_items:
            raise DataError(
                f"item {index} of {self.name} was asked for; it has {self.num_items} a seed"
            )
        item = self.source.item(index, split=split, seed=seed)
        return TaskItem(
            item_id=item.item_id,
            prompt=self.config.prompt.render(item.prompt),
            answer=item.answer,
            group=item.group,
            metadata=item.metadata,
        )

    def start(self, item: TaskItem) -> SingleTurnEpisode:
        return SingleTurnEpisode(self, item)


class SingleTurnEpisode:
    """Poses the item once and grades the first completion."""

    def __init__(self, environment: SingleTurnEnvironment, item: TaskItem) -> None:
        self._environment = environment
        self._item = item

    def reset(self) -> tuple[Message, ...] | str:
        return self._item.prompt

    def step(self, completion: str) -> Turn:
        environment, item = self._environment, self._item
        answer = extract_answer(completion, environment.config.extract)
        score = environment.source.score(answer, item)
        rewards: dict[str, float] = {}
        total = 0.0
        for name, (verifier, weight) in environment.verifiers.items():
            try:
                (reward,) = verifier(
                    [item.prompt],
                    [completion],
                    answer=[item.answer],
                    extracted=[answer],
                    score=[score],
                    item_id=[item.item_id],
                    metadata=[item.metadata],
                )
            except SCORER_FAILURES as error:
                return _failed(score, answer, f"reward {name}: {type(error).__name__}: {error}")
            if reward is not None:
                rewards[name] = float(reward)
                total += weight * float(reward)
        if not rewards:
            return _failed(score, answer, "no verifier judged this completion")
        return Turn(grade=Grade(reward=total, score=score, rewards=rewards, answer=answer))


def _failed(score: float, answer: str | None, error: str) -> Turn:
    return Turn(grade=Grade(reward=0.0, score=score, answer=answer, error=error))
