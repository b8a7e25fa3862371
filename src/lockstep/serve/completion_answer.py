"""Answers of `/v1/completions`: several prompts, echo, and logprobs with text offsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lockstep.core.records import SampleDelta, TokenLogprob
from lockstep.serve.answers import ChoiceKey, Head, Json, ending
from lockstep.serve.logprobs import (
    OffsetCounter,
    TokenNames,
    completion_logprobs,
    prompt_logprobs,
)
from lockstep.serve.prompts import ParsedPrompt
from lockstep.serve.wire import CompletionRequest
from lockstep.text.tokenizer import Tokenizer


class CompletionAnswer:
    """Choice numbers count all samples of the first prompt, then those of the second, and so on."""

    chunk_kind = "text_completion"

    def __init__(
        self,
        request: CompletionRequest,
        prompts: Sequence[ParsedPrompt],
        tokenizer: Tokenizer,
        *,
        head: Head,
        names: TokenNames,
    ) -> None:
        self.head = head
        self._request = request
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._names = names
        self._num_samples = request.n or 1
        self._counters: dict[ChoiceKey, OffsetCounter] = {}
        self._prompt_logprobs: dict[int, tuple[TokenLogprob | None, ...]] = {}

    def chunks(self, number: int, delta: SampleDelta) -> Iterator[Json]:
        is_first = (number, delta.index) not in self._counters
        shows_tokens = self._request.logprobs is not None or self._request.return_token_ids
        choice = self._choice(number, delta)
        if (
            choice["text"]
            or delta.finish_reason
            or (shows_tokens and (is_first or delta.token_ids))
            or "prompt_logprobs" in choice
        ):
            yield self.head.of(self.chunk_kind, [choice])

    def whole(self, samples: Mapping[ChoiceKey, SampleDelta]) -> Json:
        choices = [self._choice(number, delta) for (number, _), delta in sorted(samples.items())]
        return self.head.of("text_completion", choices)

    def _choice(self, number: int, delta: SampleDelta) -> Json:
        """What `delta` adds to its choice; the first one brings the echoed prompt along."""
        key = (number, delta.index)
        prompt = self._prompts[number]
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[number] = delta.prompt_logprobs
        is_first = key not in self._counters
        echoed = self._echoed_text(prompt) if is_first and self._request.echo else ""
        choice: Json = {
            "index": number * self._num_samples + delta.index,
            "text": echoed + delta.text,
            "logprobs": self._logprobs(number, delta, echoed, is_first=is_first),
            "finish_reason": delta.finish_reason,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if is_first:
                choice["prompt_token_ids"] = list(prompt.token_ids)
        if is_first and self._request.prompt_logprobs is not None:
            entries = _with_top(self._prompt_logprobs[number], self._request.prompt_logprobs)
            choice["prompt_logprobs"] = prompt_logprobs(entries, self._names)
        return choice | ending(delta)

    def _echoed_text(self, prompt: ParsedPrompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._tokenizer.decode(prompt.token_ids, skip_special_tokens=False)

    def _logprobs(
        self, number: int, delta: SampleDelta, echoed: str, *, is_first: bool
    ) -> Json | None:
        key = (number, delta.index)
        if is_first:
            self._counters[key] = OffsetCounter(
                self._tokenizer,
                start=len(echoed),
                skip_special_tokens=self._request.skip_special_tokens is not False,
            )
        if self._request.logprobs is None:
            return None
        ids = list(delta.token_ids)
        offsets = self._counters[key].offsets(ids)
        entries: list[TokenLogprob | None] = list(delta.logprobs)
        if is_first and self._request.echo:
            prompt_ids = self._prompts[number].token_ids
            offsets = self._prompt_offsets(prompt_ids, echoed) + offsets
            entries = [*self._prompt_logprobs[number], *entries]
            ids = [*prompt_ids, *ids]
        trimmed = _with_top(entries, self._request.logprobs)
        return completion_logprobs(trimmed, offsets, self._names, ids=ids)

    def _prompt_offsets(self, ids: Sequence[int], echoed: str) -> list[int]:
        """Special tokens that the tokenizer added are not part of the text the client sent."""
        spelled_out = self._tokenizer.decode(ids, skip_special_tokens=False) == echoed
        return OffsetCounter(
            self._tokenizer,
            skip_special_tokens=not spelled_out,
            strips_first_space=self._tokenizer.strips_first_space,
        ).offsets(ids)


def _with_top(entries: Sequence[TokenLogprob | None], count: int) -> list[TokenLogprob | None]:
    """At most `count` alternatives each: the engine gives as many as any field asked for."""
    return [entry if entry is None else replace(entry, top=entry.top[:count]) for entry in entries]
