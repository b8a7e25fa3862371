"""One sample as it grows: tokens in, text out, and the decision that it is complete."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from lockstep.core.records import FinishReason
from lockstep.core.sampling import SamplingParams
from lockstep.text.detokenizer import IncrementalDetokenizer, StopMatcher
from lockstep.text.tokenizer import Tokenizer


class Growth(NamedTuple):
    """What one more token did to a sample."""

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class SampleText:
    """Text and end of one sample.

    A sample ends at an end-of-sequence token, a stop token, a stop string, or its last allowed
    token, in this order of precedence. The text of the token that ended it is left out unless the
    request includes stop strings. Stop strings are not looked for in the first min_tokens tokens.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        max_new_tokens: int,
    ) -> None:
        self._params = params
        self._eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._max_new_tokens = max_new_tokens
        self._num_tokens = 0
        self._detokenizer = (
            None
            if tokenizer is None
            else IncrementalDetokenizer(
                tokenizer, skip_special_tokens=params.skip_special_tokens, is_continuation=True
            )
        )
        self._matcher = StopMatcher(params.stop, include=params.include_stop_str_in_output)

    @property
    def end_tokens(self) -> frozenset[int]:
        """Tokens that would end the sample."""
        return self._eos_token_ids | frozenset(self._params.stop_token_ids)

    def push(self, token: int) -> Growth:
        """Add a drawn token."""
        self._num_tokens += 1
        if token in self._eos_token_ids:
            return self._finish(token, "stop", None)
        if token in self._params.stop_token_ids:
            return self._finish(token, "stop", token)
        text = self._search(self._decode(token))
        if self._matcher.matched is not None:
            return Growth(text=text, finish_reason="stop", stop_reason=self._matcher.matched)
        if self._num_tokens >= self._max_new_tokens:
            return self._close(text, "length", None)
        return Growth(text=text)

    def finish(self) -> str:
        """Text that was held back, when no token ended the sample."""
        return self._close("", "abort", None).text

    def _finish(self, end_token: int, reason: FinishReason, stop_reason: int | None) -> Growth:
        includes_end = self._params.include_stop_str_in_output
        text = self._search(self._decode(end_token)) if includes_end else ""
        return self._close(text, reason, stop_reason)

    def _close(self, text: str, reason: FinishReason, stop_reason: int | str | None) -> Growth:
        """Let go of what was held back: no more tokens will come."""
        if self._detokenizer is not None:
            text += self._search(self._detokenizer.finish())
        if self._matcher.matched is not None:
            return Growth(text=text, finish_reason="stop", stop_reason=self._matcher.matched)
        text += self._matcher.finish()
        return Growth(text=text, finish_reason=reason, stop_reason=stop_reason)

    def _decode(self, token: int) -> str:
        return "" if self._detokenizer is None else self._detokenizer.push([token])

    def _search(self, text: str) -> str:
        if self._num_tokens <= self._params.min_tokens:
            return text
        return self._matcher.push(text)
