"""Ask a model the items of a task, and grade what it says.

All prompts go to the completer at once, which batches as it likes: under Lockstep's engine the
answers do not depend on it. A request that fails is the run's failure (RequestError); a grade that
fails is a record with an error, and counts as wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lockstep.core.completer import Completer, Prompt
from lockstep.core.environment import Environment, Grade, Split, TaskItem
from lockstep.core.errors import ConfigError
from lockstep.core.records import Completion, Sample
from lockstep.core.sampling import SamplingParams
from lockstep.evaluate.results import ItemResult

DEFAULT_NUM_ITEMS = 200


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Which items, and how completions are drawn."""

    num_items: int | None = None
    """Items to pose; default: every item of a file, 200 of a generated task."""
    split: Split = "held_out"
    """Which part of a generated task; the two never share items."""
    seed: int = 0
    """Which items of the split; another seed gives other items."""
    samples_per_item: int = 1
    """Completions of each item; errors are clustered by item if there are several."""
    max_tokens: int = 64
    """Longest completion, in tokens."""
    temperature: float = 0.0
    """Temperature of the draws; 0 is greedy."""
    top_p: float = 1.0
    """Draw from the most likely tokens of this total probability."""
    sampling_seed: int = 0
    """Seed of the draws when temperature is above 0."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""

    def __post_init__(self) -> None:
        if self.samples_per_item > 1 and self.temperature == 0:
            raise ConfigError(
                f"samples_per_item={self.samples_per_item} at temperature 0 draws the same "
                "completion each time; use 1, or a temperature above 0"
            )

    def sampling_of(self, position: int) -> SamplingParams:
        """Parameters of the item at `position`: each has noise of its own."""
        return SamplingParams(
            n=self.samples_per_item,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.stop,
            seed=self.sampling_seed * 1_000_003 + position,
        )


def select_items(environment: Environment, config: GenerationConfig) -> list[TaskItem]:
    """The first `num_items` items of the split and seed."""
    available = environment.num_items
    num = config.num_items
    if num is None:
        num = min(DEFAULT_NUM_ITEMS, available) if environment.has_held_out else available
    if not 1 <= num <= available:
        raise ConfigError(f"num_items must be from 1 to {available} here, got {num}")
    return [environment.item(i, split=config.split, seed=config.seed) for i in range(num)]


def evaluate_generation(
    completer: Completer,
    environment: Environment,
    items: Sequence[TaskItem],
    config: GenerationConfig,
    *,
    on_finish: Callable[[int], None] | None = None,
) -> list[ItemResult]:
    """One result for each item and sample, in order."""
    if environment.max_turns > 1:
        raise ConfigError(
            f"{environment.name} takes up to {environment.max_turns} turns; "
            "evaluation poses single-turn tasks"
        )
    prompts = [opening_prompt(completer, environment, item) for item in items]
    params = [config.sampling_of(position) for position in range(len(items))]
    completions = completer.complete(prompts, params, on_finish=on_finish)
    return [
        _result(environment, item, completion, sample)
        for item, completion in zip(items, completions, strict=True)
        for sample in completion.samples
    ]


def opening_prompt(completer: Completer, environment: Environment, item: TaskItem) -> Prompt:
    """What the model reads first: text as it is, messages through its chat template."""
    opening = environment.start(item).reset()
    return opening if isinstance(opening, str) else completer.chat_prompt(opening)


def grade_completion(environment: Environment, item: TaskItem, completion: str) -> Grade:
    """Play a single-turn episode that answers `completion`."""
    episode = environment.start(item)
    episode.reset()
    grade = episode.step(completion).grade
    assert grade is not None, "a single-turn episode is over after one step"
    return grade


def _result(
    environment: Environment, item: TaskItem, completion: Completion, sample: Sample
) -> ItemResult:
    grade = grade_completion(environment, item, sample.text)
    return ItemResult(
        item_id=item.item_id,
        sample_index=sample.index,
        prompt=item.prompt if isinstance(item.prompt, str) else list(item.prompt),
        prompt_token_ids=completion.prompt_token_ids,
        completion=sample.text,
        token_ids=sample.token_ids,
        answer=grade.answer,
        expected=item.answer,
        score=grade.score,
        finish_reason=sample.finish_reason,
        group=item.group,
        error=grade.error,
    )
