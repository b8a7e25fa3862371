"""Questions from reasoning-gym (Apache-2.0): procedurally generated, scored by their generators.

Nearly every generator seeds item i of dataset seed s with Random(s + i), so item 5 of seed 1 is
item 4 of seed 2: seeds that are merely different overlap. Here each (split, seed) owns a block of
100,000 consecutive generator seeds, and the held-out blocks start a billion higher. Distinct
generator seeds can still give the same question when a task is small; who trains must compare the
texts too (`rl.prompts` does). The library costs 1.4 s to import: it comes with the first task.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from typing import Any

from lockstep.core.environment import Split, TaskItem
from lockstep.core.errors import ConfigError
from lockstep.evaluate.single_turn import SCORER_FAILURES

ITEMS_PER_SEED = 100_000
MAX_SEED = 9_999
HELD_OUT_BASE = 1_000_000_000


class ReasoningGymSource:
    """One generator with its settings, `NAME` or `NAME:key=value,...`."""

    has_held_out = True
    num_items = ITEMS_PER_SEED

    def __init__(self, spec: str) -> None:
        self._generator, _, settings = spec.partition(":")
        self._settings = _parse_settings(settings, spec)
        self._datasets: dict[tuple[Split, int], Any] = {}
        canonical = ",".join(f"{key}={_show(value)}" for key, value in self._settings.items())
        self.name = f"reasoning_gym:{self._generator}" + (f":{canonical}" if canonical else "")
        self._dataset("held_out", 0)  # a bad name or setting fails now, not at the first item

    def item(self, index: int, *, split: Split, seed: int) -> TaskItem:
        entry = self._dataset(split, seed)[index]
        if not isinstance(entry["answer"], str):
            raise ConfigError(
                f"{self.name} gives no reference answer as text (item {index}: "
                f"{entry['answer']!r}), so it cannot be evaluated; choose another generator"
            )
        return TaskItem(
            item_id=f"{self.name}/{split}/{seed}/{index}",
            prompt=entry["question"],
            answer=entry["answer"],
            metadata=entry,
        )

    def score(self, answer: str | None, item: TaskItem) -> float:
        """The generator's score; 0 where it cannot read the answer (several raise instead)."""
        try:
            return float(self._dataset("held_out", 0).score_answer(answer, dict(item.metadata)))
        except SCORER_FAILURES:
            return 0.0

    def _dataset(self, split: Split, seed: int) -> Any:
        if (split, seed) not in self._datasets:
            if not 0 <= seed <= MAX_SEED:
                raise ConfigError(f"task seed must be from 0 to {MAX_SEED}, got {seed}")
            base = HELD_OUT_BASE if split == "held_out" else 0
            self._datasets[split, seed] = self._create(base + seed * ITEMS_PER_SEED)
        return self._datasets[split, seed]

    def _create(self, generator_seed: int) -> Any:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if self._generator not in DATASETS:
            near = difflib.get_close_matches(self._generator, DATASETS, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "see reasoning-gym's gallery"
            raise ConfigError(
                f"reasoning_gym has no generator {self._generator!r} among its "
                f"{len(DATASETS)}; {hint}"
            )
        known = {field.name for field in dataclasses.fields(DATASETS[self._generator][1])}
        known -= {"seed", "size"}
        unknown = sorted(set(self._settings) - known)
        if unknown:
            raise ConfigError(
                f"{self._generator} has no setting {', '.join(unknown)}; "
                f"it has {', '.join(sorted(known))}"
            )
        try:
            return reasoning_gym.create_dataset(
                self._generator, seed=generator_seed, size=ITEMS_PER_SEED, **self._settings
            )
        except SCORER_FAILURES as error:
            raise ConfigError(f"{self._generator} refuses its settings: {error}") from error


def _parse_settings(text: str, spec: str) -> dict[str, Any]:
    """`a=1,b=[1,2],c=word` as a dict sorted by key; values are JSON, or else plain words."""
    settings: dict[str, Any] = {}
    for part in _split_outside_brackets(text):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise ConfigError(f"task setting {part!r} in {spec!r} is not of the form key=value")
        try:
            settings[key.strip()] = json.loads(value)
        except json.JSONDecodeError:
            lowered = value.strip().lower()
            settings[key.strip()] = lowered == "true" if lowered in ("true", "false") else value
    return dict(sorted(settings.items()))


def _split_outside_brackets(text: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return [part for part in parts if part.strip()]


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
