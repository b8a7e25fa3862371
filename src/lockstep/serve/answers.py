"""What every answer carries: identity, usage, and the interface of the two answer formats."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lockstep.core.records import SampleDelta

Json = dict[str, Any]
ChoiceKey = tuple[int, int]
"""(prompt number, sample index)."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """The fields all chunks of one answer share."""

    prefix: str
    """`chatcmpl` or `cmpl`."""
    model: str
    system_fingerprint: str
    unique: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return f"{self.prefix}-{self.unique}"

    def of(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


class Usage:
    """Token counts of one HTTP request, over all its prompts and samples."""

    def __init__(self, prompt_lengths: Sequence[int]) -> None:
        self._prompt_tokens = sum(prompt_lengths)
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}

    def add(self, number: int, delta: SampleDelta) -> None:
        self._completion_tokens += len(delta.token_ids)
        self._cached[number] = max(delta.num_cached_tokens, self._cached.get(number, 0))

    def body(self) -> Json:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class Answer(Protocol):
    """One of OpenAI's two formats, whole and in chunks."""

    head: Head
    chunk_kind: str

    def chunks(self, number: int, delta: SampleDelta) -> Iterator[Json]:
        """What a delta adds to the stream; nothing if all its text is still held back."""
        ...

    def whole(self, samples: Mapping[ChoiceKey, SampleDelta]) -> Json:
        """The unstreamed answer, without usage."""
        ...


def ending(delta: SampleDelta) -> Json:
    """Why a choice ended, and the seed that repeats it; empty while it goes on."""
    if delta.finish_reason is None:
        return {}
    return {"stop_reason": delta.stop_reason, "seed": delta.seed}
