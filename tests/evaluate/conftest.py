"""A completer without a model: it says what a function of the prompt tells it to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from lockstep.core.completer import Message, Prompt
from lockstep.core.records import Completion, Sample, TokenLogprob
from lockstep.core.sampling import SamplingParams


class ScriptedCompleter:
    """Implements `Completer` over bytes as tokens; `score` prefers what `reply` would say."""

    model_name = "scripted"

    def __init__(self, reply: Callable[[str], str]) -> None:
        self.reply = reply

    def chat_prompt(self, messages: Sequence[Message]) -> Prompt:
        return "".join(f"<{message['role']}>{message['content']}\n" for message in messages)

    def complete(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        on_finish: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        return [
            self._complete(i, str(prompt), each, on_finish)
            for i, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]

    def _complete(
        self,
        index: int,
        prompt: str,
        params: SamplingParams,
        on_finish: Callable[[int], None] | None,
    ) -> Completion:
        said = self.reply(prompt).encode()
        kept = said[: params.max_tokens]
        samples = tuple(
            Sample(
                index=i,
                text=kept.decode(),
                token_ids=tuple(kept),
                logprobs=tuple(TokenLogprob(token_id=token, logprob=0.0) for token in kept),
                finish_reason="stop" if kept == said else "length",
            )
            for i in range(params.n)
        )
        if on_finish:
            on_finish(index)
        return Completion(
            request_id=str(index), prompt_token_ids=tuple(prompt.encode()), samples=samples
        )

    def score(self, pairs: Sequence[tuple[Prompt, str]]) -> list[list[float]]:
        return [
            [-0.1 if text.strip() == self.reply(str(prompt)) else -1.0 for _ in text]
            for prompt, text in pairs
        ]


@pytest.fixture
def scripted_completer() -> type[ScriptedCompleter]:
    return ScriptedCompleter
