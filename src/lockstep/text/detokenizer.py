"""Streaming text out of a stream of tokens.

`IncrementalDetokenizer` never emits half a character: bytes that may yet become one wait for the
next token. `StopMatcher` never emits text that may yet turn out to be a stop string. For both,
what comes out in all is independent of how the input was cut into pieces.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from lockstep.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Concatenated results of `push` and one `finish` equal `tokenizer.decode` of all the tokens
    pushed.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        is_continuation: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._strip_space = tokenizer.strips_first_space and not is_continuation
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text these tokens complete; may be empty."""
        data = self._tokenizer.decode_bytes(
            token_ids, skip_special_tokens=self._skip_special_tokens
        )
        if data and self._strip_space:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(data)

    def finish(self) -> str:
        """What is left: U+FFFD if the tokens ended within a character, else nothing."""
        return self._utf8.decode(b"", final=True)


class StopMatcher:
    """Cuts a stream of text at the first stop string to be completed.

    Of several completed at the same character the longest counts. With `include` the stop string
    itself is still emitted. After a match, everything further is dropped.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text; None while it goes on."""

    def push(self, text: str) -> str:
        """The part of the text so far, not yet emitted, that no stop string can claim any more."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        text = self._held + text
        if (end := self._first_end(text)) is not None:
            stop = max((s for s in self._stops if text.endswith(s, 0, end)), key=len)
            self.matched, self._held = stop, ""
            return text[:end] if self._include else text[: end - len(stop)]
        cut = len(text) - self._num_claimed(text)
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """The text held back, now that no more will come."""
        held, self._held = self._held, ""
        return held

    def _first_end(self, text: str) -> int | None:
        ends = [at + len(s) for s in self._stops if (at := text.find(s)) >= 0]
        return min(ends, default=None)

    def _num_claimed(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        longest = max((len(s) for s in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            suffix = text[len(text) - size :]
            if any(s.startswith(suffix) for s in self._stops):
                return size
        return 0
