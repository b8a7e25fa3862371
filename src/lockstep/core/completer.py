"""What evaluation and RL ask of a model: complete these prompts, score these continuations.

An in-process engine, our server and anybody's OpenAI-compatible server all answer it, so they are
interchangeable. Prompts travel as token ids or text; results always carry token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lockstep.core.records import Completion
from lockstep.core.sampling import SamplingParams

Prompt = str | Sequence[int]
Message = dict[str, object]


class Completer(Protocol):
    """Order of results is the order of inputs; a failed request raises RequestError."""

    @property
    def model_name(self) -> str: ...

    def complete(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_finish: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Generate; `on_finish(i)` is called as each prompt is done, for progress bars."""
        ...

    def chat_prompt(self, messages: Sequence[Message]) -> Prompt:
        """Render messages with the model's chat template, generation prompt included."""
        ...

    def score(self, pairs: Sequence[tuple[Prompt, str]]) -> list[list[float]]:
        """Raw logprob of each token of the continuation, given the prompt, for every pair."""
        ...
