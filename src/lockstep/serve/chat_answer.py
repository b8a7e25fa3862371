"""Answers of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lockstep.core.records import SampleDelta
from lockstep.serve.answers import ChoiceKey, Head, Json, ending
from lockstep.serve.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from lockstep.serve.prompts import ParsedPrompt
from lockstep.serve.wire import ChatRequest


class ChatAnswer:
    """A conversation has one prompt, so the prompt's number is always 0."""

    chunk_kind = "chat.completion.chunk"

    def __init__(
        self, request: ChatRequest, prompt: ParsedPrompt, *, head: Head, names: TokenNames
    ) -> None:
        self.head = head
        self._request = request
        self._prompt = prompt
        self._names = names
        self._started: set[int] = set()

    def chunks(self, number: int, delta: SampleDelta) -> Iterator[Json]:
        if delta.index not in self._started:
            yield self._first_chunk(delta)
            self._started.add(delta.index)
        shows_tokens = self._request.logprobs or self._request.return_token_ids
        if delta.text or delta.finish_reason or (shows_tokens and delta.token_ids):
            choice = {
                "index": delta.index,
                "delta": {"content": delta.text},
                "logprobs": self._logprobs(delta),
                "finish_reason": delta.finish_reason,
            }
            yield self.head.of(self.chunk_kind, [choice | self._token_ids(delta) | ending(delta)])

    def whole(self, samples: Mapping[ChoiceKey, SampleDelta]) -> Json:
        choices = []
        for _, delta in sorted(samples.items()):
            choice = {
                "index": delta.index,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                "logprobs": self._logprobs(delta),
                "finish_reason": delta.finish_reason,
            }
            choices.append(choice | self._token_ids(delta) | ending(delta))
        return self.head.of("chat.completion", choices) | self._of_prompt(samples[0, 0])

    def _first_chunk(self, delta: SampleDelta) -> Json:
        choice = {
            "index": delta.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunk = self.head.of(self.chunk_kind, [choice])
        return chunk if self._started else chunk | self._of_prompt(delta)

    def _of_prompt(self, delta: SampleDelta) -> Json:
        fields: Json = {}
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = list(self._prompt.token_ids)
        if delta.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(delta.prompt_logprobs, self._names)
        return fields

    def _logprobs(self, delta: SampleDelta) -> Json | None:
        return chat_logprobs(delta.logprobs, self._names) if self._request.logprobs else None

    def _token_ids(self, delta: SampleDelta) -> Json:
        return {"token_ids": list(delta.token_ids)} if self._request.return_token_ids else {}
