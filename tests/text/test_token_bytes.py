from __future__ import annotations

from tokenizers import pre_tokenizers

from lockstep.text.token_bytes import TokenBytes, byte_to_char


def test_the_table_covers_every_byte_once() -> None:
    table = byte_to_char()
    assert sorted(table) == list(range(256))
    assert set(table.values()) == set(pre_tokenizers.ByteLevel.alphabet())


def test_byte_level_and_literal_tokens() -> None:
    table = byte_to_char()
    pieces = {0: table[0xC3] + table[0x20], 1: "<é>", 3: "日"}
    found = TokenBytes(pieces, literal={1: "<é>"}, decoder={"type": "ByteLevel"})
    assert found[0] == b"\xc3 "
    assert found[1] == "<é>".encode()
    assert found[2] == b""
    assert found[3] == "日".encode()
    assert found[99] == b""
    assert found[-1] == b""
    assert not found.strips_first_space


def test_sentencepiece_tokens() -> None:
    decoder = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
    found = TokenBytes({0: "<0xE4>", 1: "\u2581a\u2581"}, literal={}, decoder=decoder)
    assert (found[0], found[1]) == (b"\xe4", b" a ")
    assert found.strips_first_space
