"""Token ids of a training record, and which of them the model is to learn to say.

Loss lies on what the assistant says and on the token that ends its turn, and on nothing else.
Where that is, the chat template decides: its `{% generation %}` blocks where it has them, else
prefix differencing: the conversation before a turn, rendered with the generation prompt, must be
the beginning of the conversation rendered with the turn; what follows is the turn. A template that
rewrites earlier turns (Qwen3 drops their thoughts) gives one document for each turn, each as the
model would see it when generating.

What was found is checked: the tokens before a turn are those the model would be prompted with, the
turn ends in an end-of-sequence token and has no other, and it decodes to the message's content.
Where a check fails the record is refused: a mask that is silently wrong costs a training run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.core.errors import DataError
from lockstep.text.chat_template import ChatTemplate
from lockstep.text.records import Conversation, Message, PlainText
from lockstep.text.tokenizer import Tokenizer
from lockstep.train.packing import Document


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """One assistant message, and the characters of the rendered text that the model would write."""

    message: Message
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class _Rendering:
    text: str
    turns: tuple[_Turn, ...]


@dataclass(frozen=True, kw_only=True)
class _TokenizedTurns:
    token_ids: list[int]
    ranges: list[tuple[int, int]]
    """Half-open token range of each turn, whitespace after its end included."""


class RecordTokenizer:
    """Turns records into documents for one model; `eos_token_ids` are what ends its generation."""

    def __init__(self, tokenizer: Tokenizer, *, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        if not self._eos_token_ids:
            raise DataError(
                "the model names no end-of-sequence token; add eos_token_id to config.json"
            )
        added = tokenizer.encode("", add_special_tokens=True)
        self._leading = [token for token in added if token == tokenizer.bos_token_id]

    def documents(self, record: Conversation | PlainText) -> list[Document]:
        """Usually one; one for each assistant turn where the template rewrites earlier ones."""
        if isinstance(record, PlainText):
            return [self._plain_document(record)]
        if (template := self._tokenizer.chat_template) is None:
            raise DataError(
                "the model has no chat template; give prompt and completion as strings, "
                "or put a chat_template.jinja into the model's folder"
            )
        return [self._chat_document(rendering) for rendering in _render(record, template)]

    def _plain_document(self, record: PlainText) -> Document:
        text = record.prompt + record.completion
        tokenized = self._tokenize(text, [(len(record.prompt), len(text))])
        ((first, _),) = tokenized.ranges
        named = self._tokenizer.eos_token_id
        end = named if named in self._eos_token_ids else min(self._eos_token_ids)
        token_ids = [*self._leading, *tokenized.token_ids, end]
        return _document(token_ids, [(len(self._leading) + first, len(token_ids))])

    def _chat_document(self, rendering: _Rendering) -> Document:
        turns = rendering.turns
        tokenized = self._tokenize(rendering.text, [(turn.start, turn.end) for turn in turns])
        trained = []
        for turn, (first, stop) in zip(turns, tokenized.ranges, strict=True):
            end = self._end_of_turn(tokenized.token_ids, first, stop)
            self._check_content(turn.message, tokenized.token_ids[first:end])
            trained.append((first, end + 1))
        return _document(tokenized.token_ids, trained)

    def _tokenize(self, text: str, spans: Sequence[tuple[int, int]]) -> _TokenizedTurns:
        """Tokens such that those before each span are what the text before it encodes to."""
        whole = self._tokenizer.encode_with_spans(text)
        starts = np.array([start for start, _ in whole.char_spans], dtype=np.int64)
        ranges = [(int((starts < first).sum()), int((starts < end).sum())) for first, end in spans]
        if all(
            whole.token_ids[:count] == self._tokenizer.encode(text[:first])
            for (first, _), (count, _) in zip(spans, ranges, strict=True)
        ):
            return _TokenizedTurns(token_ids=whole.token_ids, ranges=ranges)
        return self._tokenize_in_pieces(text, spans)

    def _tokenize_in_pieces(self, text: str, spans: Sequence[tuple[int, int]]) -> _TokenizedTurns:
        """For a token that straddles the start of a turn: the model could not have written it."""
        token_ids: list[int] = []
        ranges = []
        done = 0
        for start, end in spans:
            token_ids += self._tokenizer.encode(text[done:start])
            first = len(token_ids)
            token_ids += self._tokenizer.encode(text[start:end])
            ranges.append((first, len(token_ids)))
            done = end
        token_ids += self._tokenizer.encode(text[done:])
        if self._tokenizer.decode(token_ids, skip_special_tokens=False) != text:
            first = spans[0][0]
            raise DataError(
                f"a token straddles the start of the model's words, after {text[:first][-20:]!r}, "
                "and this tokenizer cannot encode the parts alone; strip leading spaces and "
                "newlines from the content"
            )
        return _TokenizedTurns(token_ids=token_ids, ranges=ranges)

    def _end_of_turn(self, token_ids: Sequence[int], first: int, stop: int) -> int:
        """Index of the end-of-sequence token that ends the turn at `first`."""
        inside = [i for i in range(first, stop) if token_ids[i] in self._eos_token_ids]
        if len(inside) > 1:
            raise DataError(
                f"an assistant turn has {len(inside)} end-of-sequence tokens, 1 was expected; "
                f"take {self._name(token_ids[inside[0]])} out of the content"
            )
        if not inside and stop < len(token_ids) and token_ids[stop] in self._eos_token_ids:
            return stop  # a {% generation %} block that closes before it
        tail = self._tokenizer.decode(token_ids[(inside or [first - 1])[0] + 1 : stop])
        if not inside or tail.strip():
            names = ", ".join(self._name(token) for token in sorted(self._eos_token_ids))
            raise DataError(
                f"the chat template ends an assistant turn with {tail[-20:]!r}, not with an "
                f"end-of-sequence token of this model ({names}), so it would not learn to stop; "
                "correct the template or eos_token_id in generation_config.json"
            )
        return inside[0]

    def _check_content(self, message: Message, token_ids: Sequence[int]) -> None:
        said = self._tokenizer.decode(token_ids, skip_special_tokens=False, is_continuation=True)
        for text in _texts(message):
            if text.strip() not in said:
                raise DataError(
                    f"the assistant turn was located as {said[:60]!r}, but its content is "
                    f"{text[:60]!r}; the chat template does not show the content as it is"
                )

    def _name(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


def _render(record: Conversation, template: ChatTemplate) -> list[_Rendering]:
    """The conversation as text with its trained turns; several when the template rewrites turns."""
    messages = record.messages
    trained = [
        index
        for index in range(record.first_trained, len(messages))
        if messages[index]["role"] == "assistant"
    ]
    if not trained:
        raise DataError("there is no assistant message to train on; add one or drop the record")
    messages = messages[: trained[-1] + 1]  # nothing after the last trained turn can matter
    whole = template.render_with_spans(messages, tools=record.tools)
    assistants = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(whole.generation_spans) == len(assistants):
        spans = dict(zip(assistants, whole.generation_spans, strict=True))
        turns = [_Turn(message=messages[i], start=spans[i][0], end=spans[i][1]) for i in trained]
        return [_Rendering(text=whole.text, turns=tuple(turns))]
    alone = [_render_turn(record, template, index) for index in trained]
    if all(whole.text.startswith(rendering.text) for rendering in alone):
        return [_Rendering(text=whole.text, turns=tuple(turn for r in alone for turn in r.turns))]
    return alone


def _render_turn(record: Conversation, template: ChatTemplate, index: int) -> _Rendering:
    """The conversation up to and with message `index`, which is located by prefix differencing."""
    messages, tools = record.messages, record.tools
    before = template.render(messages[:index], tools=tools, add_generation_prompt=True)
    text = template.render(messages[: index + 1], tools=tools)
    if not text.startswith(before):
        agreed = _length_of_agreement(text, before)
        raise DataError(
            f"assistant message {index} cannot be located: with it the template renders "
            f"{text[agreed:][:30]!r} where the generation prompt has {before[agreed:][:30]!r}; "
            "use a template with {% generation %} blocks"
        )
    turn = _Turn(message=messages[index], start=len(before), end=len(text))
    return _Rendering(text=text, turns=(turn,))


def _length_of_agreement(left: str, right: str) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def _texts(message: Message) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if content is not None else ()
    return [part["text"] for part in parts if isinstance(part, dict) and "text" in part]


def _document(token_ids: Sequence[int], trained: Sequence[tuple[int, int]]) -> Document:
    """Tokens up to the last trained one: what follows it can neither be learned nor influence."""
    stop = max(end for _, end in trained)
    weights = np.zeros(stop, dtype=np.float32)
    for first, end in trained:
        weights[first:end] = 1.0
    return Document(token_ids=np.asarray(token_ids[:stop], dtype=np.int32), loss_weights=weights)
