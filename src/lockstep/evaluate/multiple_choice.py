"""Multiple choice by likelihood: the model's answer is the choice it finds most likely.

A line of the JSONL file is `{"question", "choices": [text, ...], "answer": index | text | letter}`,
`id` and `group` optional. Metrics as lm-eval defines them, with ties to the first choice:
- accuracy: largest sum of the continuation's token logprobs;
- acc_norm: the same sum divided by the choice's length in characters;
- acc_bytes: divided by its length in UTF-8 bytes (equal to acc_norm for ASCII).
In text style a space joins question and choice and is not counted in the length.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.completer import Completer, Prompt
from lockstep.core.errors import DataError
from lockstep.evaluate.jsonl import Record, group_name, item_name, read_records, required
from lockstep.evaluate.prompts import PromptConfig
from lockstep.evaluate.results import ItemResult

NUM_ITEMS_A_CALL = 16


@dataclass(frozen=True, kw_only=True)
class ChoiceItem:
    item_id: str
    question: str
    choices: tuple[str, ...]
    answer: int
    """Index of the right choice."""
    group: str | None = None


def read_choice_items(path: Path, num_items: int | None = None) -> list[ChoiceItem]:
    """The file's items; DataError names the file and line of the first that cannot be used."""
    items = [_read_item(record, path, number) for number, record in read_records(path)]
    if not items:
        raise DataError(f"{path} holds no items; one JSON object a line is wanted")
    if num_items is not None and not 1 <= num_items <= len(items):
        raise DataError(f"num_items must be from 1 to {len(items)} for {path}, got {num_items}")
    return items[:num_items]


def evaluate_choices(
    completer: Completer,
    items: Sequence[ChoiceItem],
    prompt: PromptConfig,
    *,
    on_finish: Callable[[int], None] | None = None,
) -> list[ItemResult]:
    """One result for each item, in order."""
    results: list[ItemResult] = []
    for start in range(0, len(items), NUM_ITEMS_A_CALL):
        batch = items[start : start + NUM_ITEMS_A_CALL]
        pairs = [pair for item in batch for pair in _pairs(completer, item, prompt)]
        sums = iter([sum(logprobs) for logprobs in completer.score(pairs)])
        for item in batch:
            results.append(_grade(item, prompt, [next(sums) for _ in item.choices]))
            if on_finish:
                on_finish(len(results) - 1)
    return results


def _pairs(
    completer: Completer, item: ChoiceItem, config: PromptConfig
) -> list[tuple[Prompt, str]]:
    rendered = config.render(item.question)
    if not isinstance(rendered, str):
        context: Prompt = completer.chat_prompt(rendered)
        return [(context, choice) for choice in item.choices]
    return [(rendered.rstrip(" "), f" {choice}") for choice in item.choices]


def _grade(item: ChoiceItem, config: PromptConfig, sums: Sequence[float]) -> ItemResult:
    characters = [len(choice) for choice in item.choices]
    num_bytes = [len(choice.encode()) for choice in item.choices]
    chosen = _best(sums)
    rendered = config.render(item.question)
    return ItemResult(
        item_id=item.item_id,
        prompt=rendered if isinstance(rendered, str) else list(rendered),
        completion=item.choices[chosen],
        answer=item.choices[chosen],
        expected=item.choices[item.answer],
        score=float(chosen == item.answer),
        metrics={
            "acc_norm": float(_best(_divide(sums, characters)) == item.answer),
            "acc_bytes": float(_best(_divide(sums, num_bytes)) == item.answer),
        },
        group=item.group,
        details={"choices": list(item.choices), "logprob_sums": list(sums)},
    )


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda index: (values[index], -index))


def _divide(sums: Sequence[float], lengths: Sequence[int]) -> list[float]:
    return [total / length for total, length in zip(sums, lengths, strict=True)]


def _read_item(record: Record, path: Path, number: int) -> ChoiceItem:
    question = required(record, "question", path, number)
    choices = required(record, "choices", path, number)
    if not isinstance(question, str):
        raise DataError(f"{path}:{number} question must be text, got {question!r}")
    if not isinstance(choices, list) or len(choices) < 2 or not all(map(_is_text, choices)):
        raise DataError(f"{path}:{number} choices must be a list of at least 2 non-empty texts")
    answer = required(record, "answer", path, number)
    return ChoiceItem(
        item_id=item_name(record, path, number),
        question=question,
        choices=tuple(choices),
        answer=_answer_index(answer, choices, f"{path}:{number}"),
        group=group_name(record),
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _answer_index(answer: Any, choices: list[str], where: str) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    if isinstance(answer, str):
        if answer in choices:
            return choices.index(answer)
        letters = string.ascii_uppercase[: len(choices)]
        if len(answer) == 1 and answer in letters:
            return letters.index(answer)
    raise DataError(
        f"{where} answer must be an index from 0 to {len(choices) - 1}, the text of a choice "
        f"or its letter, got {answer!r}"
    )
