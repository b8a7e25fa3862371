"""The bytes each token of a vocabulary stands for.

`tokenizer.json` spells tokens as text. Byte-level BPE maps every byte to a printable character
(the table of GPT-2: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards);
SentencePiece-style BPE writes a space as U+2581 and a lone byte as `<0xHH>`. Which of the two it
is, the file's `decoder` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lockstep.core.errors import CheckpointError

SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_to_char() -> dict[int, str]:
    """GPT-2's table: a printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(0x100 + i) for i, byte in enumerate(others)})
    return table


_CHAR_TO_BYTE = {char: byte for byte, char in byte_to_char().items()}


class TokenBytes:
    """Token id to bytes, spelled when first asked for: a whole vocabulary takes 0.1 s.
    `literal` holds the added tokens, whose text is taken as it is.
    """

    def __init__(
        self,
        pieces: Mapping[int, str],
        *,
        literal: Mapping[int, str],
        decoder: Mapping[str, Any] | None,
    ) -> None:
        steps = list(_steps(decoder))
        kinds = {step.get("type") for step in steps}
        if "ByteLevel" in kinds:
            self._spell = _spell_byte_level
        elif kinds & {"ByteFallback", "Metaspace"}:
            self._spell = _spell_sentencepiece
        else:
            got = ", ".join(sorted(str(kind) for kind in kinds)) or "none"
            raise CheckpointError(
                f"tokenizer.json has decoder {got}; supported are ByteLevel (GPT-2 style) and "
                "ByteFallback or Metaspace (SentencePiece style)"
            )
        self.strips_first_space = any(
            (step.get("type") == "Strip" and step.get("start", 0) > 0)
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        self._pieces, self._literal = pieces, literal
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        if (known := self._known.get(token_id)) is not None:
            return known
        piece, text = self._pieces.get(token_id), self._literal.get(token_id)
        if piece is None:
            return b""
        spelled = self._spell(piece) if text is None else text.encode()
        return self._known.setdefault(token_id, spelled)


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") == "Sequence":
        for step in decoder.get("decoders", ()):
            yield from _steps(step)
    else:
        yield decoder


def _spell_byte_level(piece: str) -> bytes:
    if all(char in _CHAR_TO_BYTE for char in piece):
        return bytes(_CHAR_TO_BYTE[char] for char in piece)
    return piece.encode()


def _spell_sentencepiece(piece: str) -> bytes:
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(SPACE_MARK, " ").encode()
