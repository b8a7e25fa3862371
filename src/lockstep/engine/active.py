"""Requests under way and their samples: the engine's state between steps."""

from __future__ import annotations

from collections.abc import Collection

from lockstep.core.records import FinishReason, SampleDelta, TokenLogprob
from lockstep.engine.prompt_logprobs import PromptLogprobs
from lockstep.engine.request import Request, fresh_seed, sample_seed
from lockstep.engine.sample_text import SampleText
from lockstep.engine.sampler import Draw, row_sampling, wants_logits
from lockstep.text.tokenizer import Tokenizer


class ActiveRequest:
    """A request and what its samples have in common."""

    def __init__(self, request: Request) -> None:
        params = request.params
        self.request = request
        self.prompt = tuple(request.prompt_token_ids)
        self.seed = fresh_seed() if params.seed is None else params.seed
        self.num_cached_tokens = 0
        self.open_samples: dict[int, ActiveSample] = {}
        self.prompt_logprobs = (
            None
            if params.prompt_logprobs is None
            else PromptLogprobs(
                self.prompt,
                start=request.prompt_logprobs_start,
                num_top=params.prompt_logprobs,
            )
        )

    @property
    def max_cached_tokens(self) -> int | None:
        """What prompt logprobs leave to the prefix cache."""
        return None if self.prompt_logprobs is None else self.prompt_logprobs.max_cached_tokens


class ActiveSample:
    """One of a request's n continuations, while it grows."""

    def __init__(
        self,
        request: ActiveRequest,
        *,
        index: int,
        seq_id: int,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        max_new_tokens: int,
        arrived_s: float,
    ) -> None:
        params = request.request.params
        self.request = request
        self.index = index
        self.seq_id = seq_id
        self.max_new_tokens = max_new_tokens
        self.arrived_s = arrived_s
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.is_finished = False
        self._seed = sample_seed(request.seed, index)
        self.row_sampling = row_sampling(params, self._seed)
        self._wants_logits = wants_logits(params)
        self._output: list[int] = []
        self._has_reported = False
        self._text = SampleText(
            params,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            max_new_tokens=max_new_tokens,
        )
        self._end_tokens = self._text.end_tokens

    @property
    def wants_logits(self) -> bool:
        """Its next token takes more than `row_sampling` says."""
        return self._wants_logits or len(self._output) < self.request.request.params.min_tokens

    def draw(self) -> Draw:
        """How its next token is drawn where that takes the logits."""
        return Draw(
            params=self.request.request.params,
            seed=self._seed,
            prompt=self.request.prompt,
            output=self._output,
            end_tokens=self._end_tokens,
        )

    def push(self, token: TokenLogprob) -> SampleDelta:
        """Add the token that was drawn."""
        self._output.append(token.token_id)
        growth = self._text.push(token.token_id)
        return self.delta(
            text=growth.text,
            token=token,
            finish_reason=growth.finish_reason,
            stop_reason=growth.stop_reason,
        )

    def fail(self, reason: str) -> SampleDelta:
        """End with an error; text held back for want of more is let go."""
        return self.delta(text=self._text.finish(), finish_reason="error", stop_reason=reason)

    def delta(
        self,
        *,
        text: str = "",
        token: TokenLogprob | None = None,
        finish_reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> SampleDelta:
        self.is_finished = finish_reason is not None
        is_first, self._has_reported = not self._has_reported, True
        prompt_logprobs = self.request.prompt_logprobs if is_first and self.index == 0 else None
        return SampleDelta(
            request_id=self.request.request.request_id,
            index=self.index,
            text=text,
            token_ids=() if token is None else (token.token_id,),
            logprobs=() if token is None else (token,),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs.entries),
            num_cached_tokens=self.request.num_cached_tokens,
            seed=self._seed,
        )
