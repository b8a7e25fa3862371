"""Which items each step trains on: a function of (seed, step), so that resuming needs no state.

Items go by in order of address. Generated tasks can repeat a question, so an item whose prompt is
among the held-out ones is passed over: what is measured is never what was trained on.
"""

from __future__ import annotations

import json

from lockstep.core.environment import Environment, TaskItem
from lockstep.core.errors import DataError

_STRIDE = 7_919
"""Where to look next when an item is held out: prime, so that every address comes up in time."""
_MAX_TRIES = 200


class PromptSource:
    """The training items of one task and seed."""

    def __init__(
        self, environment: Environment, *, seed: int, held_out: list[TaskItem] | None = None
    ) -> None:
        self._environment = environment
        self._seed = seed
        self._held_out = {_text(item) for item in held_out or []}
        self.num_passed_over = 0
        """Items that were skipped because their prompt is held out."""

    def batch(self, step: int, *, num_prompts: int) -> list[TaskItem]:
        """The items of step `step`, counted from 0."""
        return [self._item(step * num_prompts + index) for index in range(num_prompts)]

    def _item(self, position: int) -> TaskItem:
        num_items = self._environment.num_items
        for attempt in range(min(_MAX_TRIES, num_items)):
            index = (position + attempt * _STRIDE) % num_items
            item = self._environment.item(index, split="train", seed=self._seed)
            if _text(item) not in self._held_out:
                return item
            self.num_passed_over += 1
        raise DataError(
            f"{self._environment.name}: {_MAX_TRIES} training questions in a row are among the "
            f"{len(self._held_out)} held-out ones; the task is too small: widen its settings or "
            "lower held_out_items"
        )


def _text(item: TaskItem) -> str:
    return json.dumps(item.prompt, sort_keys=True)
