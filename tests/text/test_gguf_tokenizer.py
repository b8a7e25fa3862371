from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import CheckpointError
from lockstep.text.gguf_tokenizer import PRE_TOKENIZERS, TokenType, tokenizer_files
from lockstep.text.token_bytes import SPACE_MARK
from lockstep.text.tokenizer import Tokenizer


def split(name: str, text: str) -> list[str]:
    """The pieces a pre-tokenizer makes of ASCII text, spaces shown as they are."""
    steps = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[name]}
    library = tokenizers.Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "pre_tokenizer": steps,
                "model": {"type": "BPE", "vocab": {}, "merges": []},
            }
        )
    )
    pieces = library.pre_tokenizer.pre_tokenize_str(text)
    return [piece.replace("Ġ", " ").replace("Ċ", "\n").replace("č", "\r") for piece, _ in pieces]


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("gpt-2", "It's 1234 ok", ["It", "'s", " 1234", " ok"]),
        ("gpt-2", "a  b\n\nc", ["a", " ", " b", "\n", "\n", "c"]),
        ("smollm", "It's 123 ok", ["It", "'s", " ", "1", "2", "3", " ok"]),
        ("smollm", "x=10", ["x", "=", "1", "0"]),
        ("llama-bpe", "IT'S 12345 ok", ["IT", "'S", " ", "123", "45", " ok"]),
        ("llama-bpe", "f(x)\n\n  y", ["f", "(x", ")\n\n", " ", " y"]),
        ("llama-bpe", "a \n b", ["a", " \n", " b"]),
        ("smaug-bpe", "12345", ["123", "45"]),
        ("qwen2", "IT'S 123 ok", ["IT", "'S", " ", "1", "2", "3", " ok"]),
        ("qwen2", "a.b\r\n", ["a", ".b", "\r\n"]),
    ],
)
def test_split_rules(name: str, text: str, pieces: list[str]) -> None:
    assert split(name, text) == pieces


def sentencepiece_reference(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's BPE, word for word: join the best-scored neighbours until none are known."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: i for i, token in enumerate(tokens)}
    symbols = list((" " + text).replace(" ", SPACE_MARK)) if text else []
    while True:
        joins = [
            (scores[ids[a + b]], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids
        ]
        if not joins:
            break
        at = -max(joins)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found: list[int] = []
    for symbol in symbols:
        byte_names = [f"<0x{byte:02X}>" for byte in symbol.encode()]
        found += [ids[symbol]] if symbol in ids else [ids[name] for name in byte_names]
    return found


@given(text=st.text(st.sampled_from("helo wrdanéß北"), max_size=24))
def test_sentencepiece_pieces_are_joined_by_score(
    sentencepiece: Tokenizer, sentencepiece_metadata: dict[str, Any], text: str
) -> None:
    expected = sentencepiece_reference(sentencepiece_metadata, text)
    assert sentencepiece.encode(text) == expected
    assert sentencepiece.decode(expected) == text


def test_unknown_characters_become_bytes(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("ß")
    assert [sentencepiece.token_bytes(i) for i in ids] == [b" ", b"\xc3", b"\x9f"]


def test_the_space_prefix_can_be_off(sentencepiece_metadata: dict[str, Any]) -> None:
    bare = Tokenizer(
        tokenizer_files({**sentencepiece_metadata, "tokenizer.ggml.add_space_prefix": False})
    )
    assert bare.decode_bytes(bare.encode("world")) == b"world"
    assert bare.decode(bare.encode(" world")) == " world"


def test_special_and_added_tokens(byte_level_metadata: dict[str, Any]) -> None:
    types = list(byte_level_metadata["tokenizer.ggml.token_type"])
    types[0] = TokenType.USER_DEFINED
    built = Tokenizer(tokenizer_files({**byte_level_metadata, "tokenizer.ggml.token_type": types}))
    ids = built.encode("a<|endoftext|>b<|im_end|>")
    assert 0 in ids
    assert not built.is_special(0)
    assert built.is_special(2)
    assert built.decode(ids) == "a<|endoftext|>b"


def test_fillers_of_the_table_are_not_tokens(byte_level_metadata: dict[str, Any]) -> None:
    grown = dict(byte_level_metadata)
    size = len(grown["tokenizer.ggml.tokens"])
    grown["tokenizer.ggml.tokens"] = [*grown["tokenizer.ggml.tokens"], "[PAD1]", "[PAD2]"]
    grown["tokenizer.ggml.token_type"] = [
        *grown["tokenizer.ggml.token_type"],
        *[TokenType.UNUSED] * 2,
    ]
    built = Tokenizer(tokenizer_files(grown))
    assert built.vocab_size == size
    assert built.decode([size]) == ""
    assert built.decode(built.encode("[PAD1]")) == "[PAD1]"


def test_bos_and_eos_are_added_as_the_file_says(byte_level_metadata: dict[str, Any]) -> None:
    flags = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    built = Tokenizer(tokenizer_files({**byte_level_metadata, **flags}))
    assert built.encode("a", add_special_tokens=True) == [1, *built.encode("a"), 2]


def test_llama3_adds_bos_unless_the_file_says_otherwise(
    byte_level_metadata: dict[str, Any],
) -> None:
    metadata = {**byte_level_metadata, "tokenizer.ggml.pre": "llama-bpe"}
    del metadata["tokenizer.ggml.add_bos_token"]
    assert Tokenizer(tokenizer_files(metadata)).encode("a", add_special_tokens=True)[0] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "is 't5'; supported are 'gpt2'"),
        ({"tokenizer.ggml.pre": "unheard"}, "pre is 'unheard'; supported are"),
        ({"tokenizer.ggml.tokens": None}, "no list of str at tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "twice"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 entries for"),
        ({"tokenizer.ggml.merges": ["nope!! never!!"]}, "vocabulary does not have"),
        ({"tokenizer.ggml.merges": ["single"]}, "vocabulary does not have"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000"),
    ],
)
def test_damaged_metadata_is_one_sentence(
    byte_level_metadata: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer_files({**byte_level_metadata, **change})
