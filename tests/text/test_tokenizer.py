from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.errors import CheckpointError
from lockstep.text.tokenizer import Tokenizer

TEXTS = [
    "",
    "hello world and hello",
    "  two  spaces   three\tand\ttabs\n\n\nlines\r\n ",
    "In 2024, 3.14159 and 1,000,000; x=42",
    "naïve café, 北京, Москва, 🙂👩‍👩‍👧‍👦 and é (two code points)",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_st<|im_end|>art|>",
    "zero\u200bwidth, nul\x00, \ufeffbom, line\u2028separator",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_encoding_and_decoding_are_those_of_the_library(
    byte_level: Tokenizer, trained: tokenizers.Tokenizer
) -> None:
    for text in TEXTS:
        assert byte_level.encode(text) == trained.encode(text).ids
    for start in range(0, byte_level.vocab_size - 7, 5):
        ids = list(range(start, start + 7))  # neighbours: mostly not valid UTF-8 when joined
        for skip in (True, False):
            expected = trained.decode(ids, skip_special_tokens=skip)
            assert byte_level.decode(ids, skip_special_tokens=skip) == expected


def test_digits_stand_alone(byte_level: Tokenizer) -> None:
    pieces = [byte_level.token_bytes(i) for i in byte_level.encode("in1999,2024")]
    assert [piece for piece in pieces if piece.isdigit()] == [bytes([d]) for d in b"19992024"]


def test_special_tokens_have_ids_and_vanish_on_decoding(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>user<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert byte_level.bos_token_id == 1
    assert byte_level.eos_token_id == 2
    assert byte_level.is_special(1)
    assert not byte_level.is_special(ids[1])
    assert byte_level.decode(ids) == "user"
    assert byte_level.token_id("<|im_end|>") == 2
    assert byte_level.token_id("nonsense") is None


def test_bos_is_added_only_when_asked_for(sentencepiece: Tokenizer) -> None:
    plain = sentencepiece.encode("hello world")
    assert sentencepiece.encode("hello world", add_special_tokens=True) == [1, *plain]


def test_a_continuation_keeps_its_leading_space(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("world")
    assert sentencepiece.decode(ids) == "world"
    assert sentencepiece.decode(ids, is_continuation=True) == " world"


def test_ids_beyond_the_vocabulary_are_empty(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 10]) == ""


def test_lone_surrogates_are_replaced(byte_level: Tokenizer) -> None:
    assert byte_level.decode(byte_level.encode("a\ud800b")) == "a\ufffd\ufffd\ufffdb"


@given(text=st.text(max_size=40))
def test_spans_cover_the_text_in_order(byte_level: Tokenizer, text: str) -> None:
    encoded = byte_level.encode_with_spans(text)
    assert encoded.token_ids == byte_level.encode(text)
    covered = set()
    for start, end in encoded.char_spans:
        assert start < end
        covered.update(range(start, end))
    assert covered == set(range(len(text)))
    assert encoded.char_spans == sorted(encoded.char_spans)


def test_saving_writes_the_files_unchanged(byte_level: Tokenizer, tmp_path: Path) -> None:
    byte_level.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again.files == byte_level.files
    assert again.encode(TEXTS[4]) == byte_level.encode(TEXTS[4])


def test_transformers_reads_the_saved_folder_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in TEXTS:
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)
        assert theirs.encode(text) == tokenizer.encode(text, add_special_tokens=True)
    assert theirs.eos_token_id == tokenizer.eos_token_id
    assert theirs.bos_token_id == tokenizer.bos_token_id


def test_the_chat_template_may_lie_in_three_places(byte_level: Tokenizer, tmp_path: Path) -> None:
    byte_level.save(tmp_path)
    config_path = tmp_path / "tokenizer_config.json"
    config = json.loads(config_path.read_text())

    def template_with(value: object) -> str | None:
        config_path.write_text(json.dumps({**config, "chat_template": value}))
        loaded = Tokenizer.from_folder(tmp_path)
        return loaded.chat_template and loaded.chat_template.source

    assert template_with(None) is None
    assert template_with("in config") == "in config"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert template_with(named) == "d"
    (tmp_path / "chat_template.jinja").write_text("in file")
    assert template_with("in config") == "in file"


def test_older_folders_name_special_tokens_in_a_file_of_their_own(
    byte_level: Tokenizer, tmp_path: Path
) -> None:
    byte_level.save(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    special = {"eos_token": {"content": "<|im_end|>", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    assert Tokenizer.from_folder(tmp_path).eos_token_id == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "tokenizer.json cannot be read"),
        ('{"model": {"type": "Unheard"}}', "tokenizer.json cannot be read"),
    ],
)
def test_a_bad_tokenizer_is_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_bytes_that_are_not_text_are_one_sentence(byte_level: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match="is not UTF-8 text"):
        Tokenizer.from_folder(tmp_path)
    byte_level.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json is not valid JSON"):
        Tokenizer.from_folder(tmp_path)


def test_a_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json; convert"):
        Tokenizer.from_folder(tmp_path)


def test_an_unknown_decoder_is_refused(byte_level: Tokenizer, tmp_path: Path) -> None:
    whole = json.loads(byte_level.files.tokenizer_json)
    whole["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(CheckpointError, match="decoder WordPiece"):
        Tokenizer.from_folder(tmp_path)
