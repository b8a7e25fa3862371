"""Questions from a JSONL file, answered in free text.

A line is `{"prompt": text | messages, "answer": text | number | list of either}` or has `messages`
in place of `prompt`; `id` and `group` are optional. Several answers mean any of them is right.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.core.environment import Split, TaskItem
from lockstep.core.errors import DataError
from lockstep.evaluate.answers import Match, is_match
from lockstep.evaluate.jsonl import Record, group_name, item_name, read_records, required


class FreeAnswerSource:
    """A whole file in memory; both splits are the file."""

    has_held_out = False

    def __init__(self, path: Path, match: Match) -> None:
        self.name = f"free_answer:{path.name}"
        self._match: Match = match
        self._items = [_read_item(record, path, number) for number, record in read_records(path)]
        if not self._items:
            raise DataError(f"{path} holds no items; one JSON object a line is wanted")

    @property
    def num_items(self) -> int:
        return len(self._items)

    def item(self, index: int, *, split: Split, seed: int) -> TaskItem:
        return self._items[index]

    def score(self, answer: str | None, item: TaskItem) -> float:
        accepted = item.metadata["answers"]
        return float(any(is_match(answer, expected, self._match) for expected in accepted))


def _read_item(record: Record, path: Path, number: int) -> TaskItem:
    prompt = (
        record["messages"] if "messages" in record else required(record, "prompt", path, number)
    )
    if not (isinstance(prompt, str) or _is_messages(prompt)):
        raise DataError(
            f"{path}:{number} prompt must be text or a list of messages with role and content"
        )
    answer = required(record, "answer", path, number)
    answers = [str(one) for one in (answer if isinstance(answer, list) else [answer])]
    if not answers:
        raise DataError(f"{path}:{number} has an empty list of answers")
    return TaskItem(
        item_id=item_name(record, path, number),
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        answer=answers[0],
        group=group_name(record),
        metadata={**record, "answers": answers},
    )


def _is_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and {"role", "content"} <= each.keys() for each in value)
    )
