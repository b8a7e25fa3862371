"""Token logprobs in the shapes OpenAI's and vLLM's clients expect.

The wire's `logprob` is always the raw one: log-softmax of the model's logits. The log-probability
with which a token was actually drawn (after penalties, temperature and truncation) travels beside
it as `sampling_logprob`, an extension. A token whose bytes are not UTF-8 is written
`bytes:\\xe4\\xb8`, as OpenAI's completions do, so that two different tokens never share a name.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from lockstep.core.records import TokenLogprob
from lockstep.text.tokenizer import Tokenizer

Json = dict[str, Any]

LOWEST = -9999.0
"""JSON has no -inf; vLLM's clients know this stand-in."""


class TokenNames:
    """How tokens are spelled in logprobs: as text, or as `token_id:N` if asked for."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def __call__(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def bytes_of(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))


def chat_logprobs(logprobs: Sequence[TokenLogprob], names: TokenNames) -> Json:
    """`choices[].logprobs` of a chat completion."""
    content = []
    for entry in logprobs:
        item = _chat_token(entry.token_id, entry.logprob, names)
        item["top_logprobs"] = [_chat_token(token, value, names) for token, value in entry.top]
        item["sampling_logprob"] = _optional(entry.sampling_logprob)
        content.append(item)
    return {"content": content, "refusal": None}


def completion_logprobs(
    logprobs: Iterable[TokenLogprob | None],
    offsets: Sequence[int],
    names: TokenNames,
    *,
    ids: Sequence[int],
) -> Json:
    """`choices[].logprobs` of a plain completion; `None` is the first token of an echoed prompt."""
    entries = list(logprobs)
    return {
        "tokens": [names(token) for token in ids],
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top_by_name(entry, names) for entry in entries],
        "text_offset": list(offsets),
        "sampling_logprobs": [
            None if entry is None else _optional(entry.sampling_logprob) for entry in entries
        ],
    }


def prompt_logprobs(
    logprobs: Iterable[TokenLogprob | None], names: TokenNames
) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: for each prompt token a map by token id, its own first."""
    return [None if entry is None else _prompt_token(entry, names) for entry in logprobs]


def _prompt_token(entry: TokenLogprob, names: TokenNames) -> Json:
    own = {entry.token_id: (entry.logprob, entry.rank)}
    ranked = {token: (value, rank) for rank, (token, value) in enumerate(entry.top, start=1)}
    return {
        str(token): {"logprob": finite(value), "rank": rank, "decoded_token": names(token)}
        for token, (value, rank) in (own | ranked).items()
    }


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> Json:
    return {
        "token": names(token_id),
        "logprob": finite(logprob),
        "bytes": names.bytes_of(token_id),
    }


def _top_by_name(entry: TokenLogprob | None, names: TokenNames) -> dict[str, float] | None:
    """The most likely tokens and, always, the token itself (as OpenAI and vLLM do)."""
    if entry is None:
        return None
    top = {names(token): finite(value) for token, value in entry.top}
    top.setdefault(names(entry.token_id), finite(entry.logprob))
    return top


def _optional(value: float | None) -> float | None:
    return None if value is None else finite(value)


def finite(value: float) -> float:
    """`value`, or LOWEST for -inf and NaN, which JSON cannot carry."""
    return value if value >= LOWEST else LOWEST


class OffsetCounter:
    """Where each token's text starts, in characters of the text returned to the client.

    A character cut into several tokens starts, for all of them, where it starts.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        start: int = 0,
        skip_special_tokens: bool = True,
        strips_first_space: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._strips_space = strips_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = start

    def offsets(self, token_ids: Iterable[int]) -> list[int]:
        return [self._advance(token) for token in token_ids]

    def _advance(self, token: int) -> int:
        before = self._offset
        if not (self._skip_special_tokens and self._tokenizer.is_special(token)):
            data = self._tokenizer.token_bytes(token)
            if data and self._strips_space:
                data, self._strips_space = data.removeprefix(b" "), False
            self._offset += len(self._decoder.decode(data))
        return before
