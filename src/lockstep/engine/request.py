"""What an engine is asked, and the checks that let a bad request fail alone."""

from __future__ import annotations

import secrets
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from lockstep.core.errors import RequestError
from lockstep.core.sampling import SamplingParams

_MASK = (1 << 64) - 1


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to continue it, `params.n` times."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0
    """Lower is more urgent; equal priorities go by arrival."""
    namespace: Hashable = None
    """Requests share cached prefixes within a namespace only."""
    shares_prefix_with: str | None = None
    """An earlier request whose prompt begins alike: wait until it is computed, then share it."""
    prompt_logprobs_start: int = 1
    """First prompt position whose logprob is wanted, if any are; earlier ones are None."""


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What a model and its engine can take."""

    vocab_size: int
    max_model_len: int
    has_tokenizer: bool

    def check(self, request: Request) -> None:
        """Raises RequestError, naming the field at fault."""
        params, num_prompt = request.params, len(request.prompt_token_ids)
        if num_prompt == 0:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        self._check_ids(request.prompt_token_ids, what="the prompt has", param="prompt")
        if num_prompt + min(params.max_tokens, 1) > self.max_model_len:
            room = "" if params.max_tokens == 0 else " and at least one to generate"
            raise RequestError(
                f"the prompt has {num_prompt} tokens{room}, but max_model_len is "
                f"{self.max_model_len}; shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        self._check_ids(params.stop_token_ids, what="stop_token_ids has", param="stop_token_ids")
        self._check_ids(tuple(params.logit_bias), what="logit_bias has", param="logit_bias")
        if params.stop and not self.has_tokenizer:
            raise RequestError("stop strings need a tokenizer; this engine has none", param="stop")

    def max_new_tokens(self, request: Request) -> int:
        """`max_tokens`, cut where the sequence would outgrow the model."""
        return min(request.params.max_tokens, self.max_model_len - len(request.prompt_token_ids))

    def _check_ids(self, token_ids: Sequence[int], *, what: str, param: str) -> None:
        for token in token_ids:
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{what} token id {token}; ids go from 0 to {self.vocab_size - 1}", param=param
                )


def fresh_seed() -> int:
    """A seed for a request that names none; fits in 63 bits, so every JSON reader keeps it."""
    return secrets.randbits(63)


def sample_seed(seed: int, index: int) -> int:
    """Seed of sample `index` of n. The first keeps the request's own, so n does not change it.

    The others are SplitMix64 outputs (Steele, Lea and Flood 2014), cut to 63 bits.
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1
