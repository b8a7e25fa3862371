"""Deltas of one request, joined to a Completion."""

from __future__ import annotations

from lockstep.core.records import Completion, Sample, SampleDelta, TokenLogprob
from lockstep.engine.request import Request


class CompletionCollector:
    """Takes a request's deltas in the order they come, samples interleaved as they like."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._deltas: list[list[SampleDelta]] = [[] for _ in range(request.params.n)]
        self._num_open = request.params.n

    def push(self, delta: SampleDelta) -> bool:
        """Whether this delta finished the request."""
        self._deltas[delta.index].append(delta)
        self._num_open -= delta.finish_reason is not None
        return self._num_open == 0

    def completion(self, weight_version: int) -> Completion:
        """The whole; every sample must have finished."""
        prompt_logprobs: tuple[TokenLogprob | None, ...] | None = self._deltas[0][0].prompt_logprobs
        return Completion(
            request_id=self._request.request_id,
            prompt_token_ids=tuple(self._request.prompt_token_ids),
            samples=tuple(_sample(deltas) for deltas in self._deltas),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._deltas[0][0].num_cached_tokens,
            weight_version=weight_version,
        )


def _sample(deltas: list[SampleDelta]) -> Sample:
    last = deltas[-1]
    assert last.finish_reason is not None
    return Sample(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        seed=last.seed,
    )
