"""Calibration and held-out text: documents of a file, split, and cut into sequences.

Documents are drawn in an order that depends on the seed alone; the first of them are held out, so
that the gate never measures on a document that calibration has read. Legend: S sequences, L tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lockstep.compress.brown import fetch_brown
from lockstep.compress.config import BROWN, NO_TEXT, CalibrationConfig
from lockstep.core.errors import ConfigError, DataError, RequestError
from lockstep.text.record_files import read_records
from lockstep.text.records import Conversation, parse_record
from lockstep.text.tokenizer import Tokenizer

_SEED = 0
_MAX_DOCUMENTS = 4096
"""Kept in memory of a file, however many it has: a sample in which each has the same chance."""
_PIECE_CHARACTERS = 4000
"""Plain text is cut, at empty lines, into documents of about this length."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What calibration and gate read."""

    calibration_SL: Tensor | None
    """int64 tokens; None where there is no calibration."""
    held_out_SL: Tensor
    calibration_name: str
    held_out_name: str


def load_texts(config: CalibrationConfig, tokenizer: Tokenizer, *, quiet: bool) -> Texts:
    """Read, split and tokenise. DataError where there is not enough text, with the numbers."""
    length = config.sequence_length
    held_out = config.held_out or (BROWN if config.calibration == NO_TEXT else None)
    if held_out == config.calibration:
        held_out = None  # one source, so that no document is handed out twice
    if config.calibration == NO_TEXT:
        assert held_out is not None, "nothing to hold out from"
        source = _Source(held_out, tokenizer, quiet=quiet)
        tokens = source.take(config.held_out_sequences, length, "gate")
        return Texts(
            calibration_SL=None,
            held_out_SL=tokens,
            calibration_name="none",
            held_out_name=source.name,
        )
    source = _Source(config.calibration, tokenizer, quiet=quiet)
    other = source if held_out is None else _Source(held_out, tokenizer, quiet=quiet)
    held_out_SL = other.take(config.held_out_sequences, length, "gate")
    return Texts(
        calibration_SL=source.take(config.num_sequences, length, "calibration"),
        held_out_SL=held_out_SL,
        calibration_name=source.name,
        held_out_name=other.name if held_out else f"{other.name}, documents not calibrated on",
    )


class _Source:
    """Documents of one file in a fixed random order, each handed out once."""

    def __init__(self, given: str, tokenizer: Tokenizer, *, quiet: bool) -> None:
        self.name = "Brown corpus" if given == BROWN else given
        path = fetch_brown(quiet=quiet) if given == BROWN else Path(given)
        self._tokenizer = tokenizer
        self._texts = iter(_sampled(_documents(path, tokenizer)))
        self._path = path

    def take(self, sequences: int, length: int, purpose: str) -> Tensor:
        """(S, L) tokens of the next documents, joined by the end-of-sequence token."""
        wanted = sequences * length
        joined: list[int] = []
        end = self._tokenizer.eos_token_id
        while len(joined) < wanted:
            text = next(self._texts, None)
            if text is None:
                raise DataError(
                    f"{self._path} has {len(joined)} tokens left for the {purpose}, which needs "
                    f"{sequences} sequences of {length} = {wanted}; give more text, or ask for "
                    "fewer or shorter sequences"
                )
            joined += self._tokenizer.encode(text)
            if end is not None:
                joined.append(end)
        return torch.tensor(joined[:wanted]).view(sequences, length)


def _sampled(texts: Iterator[str]) -> Sequence[str]:
    """At most _MAX_DOCUMENTS of the texts in random order (reservoir sampling, algorithm R)."""
    generator = random.Random(_SEED)
    kept: list[str] = []
    for number, text in enumerate(texts):
        if len(kept) < _MAX_DOCUMENTS:
            kept.append(text)
        elif (place := generator.randrange(number + 1)) < _MAX_DOCUMENTS:
            kept[place] = text
    generator.shuffle(kept)
    return kept


def _documents(path: Path, tokenizer: Tokenizer) -> Iterator[str]:
    if path.suffix in (".txt", ".md"):
        yield from _pieces(path)
        return
    for place, record in read_records(path):
        try:
            parsed = parse_record(record)
            if not isinstance(parsed, Conversation):
                yield parsed.prompt + parsed.completion
            elif tokenizer.chat_template is None:
                raise ConfigError("a conversation needs a chat template, and this model has none")
            else:
                yield tokenizer.chat_template.render(
                    list(parsed.messages), tools=None if parsed.tools is None else [*parsed.tools]
                )
        except (DataError, RequestError) as error:
            raise DataError(f"{place}: {error}") from error


def _pieces(path: Path) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as UTF-8 text: {error}") from error
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) >= _PIECE_CHARACTERS:
            yield piece
            piece = ""
    if piece.strip():
        yield piece
