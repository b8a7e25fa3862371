"""What a verifiable task is: items to pose, episodes to play, and grades that need no judge.

Evaluation and RL see every task through this protocol. One episode is one attempt at one item:
`reset` gives the messages to start from, each `step` takes what the model said and answers with an
observation or with the grade. Single-turn tasks end at the first step (`evaluate.single_turn`);
multi-turn and tool-using tasks fit the same two methods.

Items are addressed by (split, seed, index), and the same address always gives the same item, so a
training run that resumes poses the same prompts. The two splits never share a generator seed.
Verifiers are functions in TRL's style: `(prompts, completions, **columns) -> list[float | None]`,
None meaning "this one is not mine to judge".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from lockstep.core.completer import Message

Split = Literal["train", "held_out"]

Verifier = Callable[..., Sequence[float | None]]
"""TRL's reward function: `(prompts, completions, **columns)`."""


@dataclass(frozen=True, kw_only=True)
class TaskItem:
    """One problem. `prompt` is messages for the chat template, or text to be continued verbatim."""

    item_id: str
    """Stable across runs and machines: names the task, its settings, the split, seed and index."""
    prompt: tuple[Message, ...] | str
    answer: str
    """The reference answer, as text."""
    group: str | None = None
    """Items that share it are not independent; standard errors are clustered by it."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Grade:
    """What a finished episode is worth. A grade with an `error` is a failed rollout, reward 0."""

    reward: float
    """Weighted sum of `rewards`: what RL maximises."""
    score: float
    """The task's own graded score in [0, 1]: what evaluation reports."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """By verifier name; those that returned None are absent."""
    answer: str | None = None
    """The answer as extracted from the completion; None if there was none."""
    error: str | None = None

    @property
    def is_correct(self) -> bool:
        return self.score >= 1.0


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An environment's reply: messages to append and answer, or a grade when it is over."""

    messages: tuple[Message, ...] = ()
    grade: Grade | None = None

    @property
    def is_done(self) -> bool:
        return self.grade is not None


class Episode(Protocol):
    """One attempt at one item. A completion it cannot use ends in a Grade, not an exception."""

    def reset(self) -> tuple[Message, ...] | str:
        """The opening prompt."""
        ...

    def step(self, completion: str) -> Turn:
        """Take the model's turn; the last turn of an episode carries the grade."""
        ...


class Environment(Protocol):
    """A task: items and how an attempt at one is played and graded."""

    @property
    def name(self) -> str:
        """The task with its settings in canonical order; part of every item id."""
        ...

    @property
    def max_turns(self) -> int:
        """Most completions one episode can ask for."""
        ...

    @property
    def has_held_out(self) -> bool:
        """Whether the held-out split differs from the training split."""
        ...

    @property
    def num_items(self) -> int:
        """Number of addresses of one split and seed."""
        ...

    def item(self, index: int, *, split: Split, seed: int = 0) -> TaskItem:
        """The item at an address; the same address always gives the same item."""
        ...

    def start(self, item: TaskItem) -> Episode: ...
