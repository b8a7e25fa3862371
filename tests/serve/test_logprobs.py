from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.records import TokenLogprob
from lockstep.serve.logprobs import (
    LOWEST,
    OffsetCounter,
    TokenNames,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from lockstep.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(tiny_model)


def test_every_token_has_a_name_of_its_own(tokenizer: Tokenizer) -> None:
    names = list(map(TokenNames(tokenizer), range(tokenizer.vocab_size)))
    assert len(set(names)) == tokenizer.vocab_size
    assert "bytes:\\xe4" in names
    assert TokenNames(tokenizer, as_ids=True)(7) == "token_id:7"


@given(data=st.data())
def test_offsets_are_where_the_text_so_far_ends(data: st.DataObject, tokenizer: Tokenizer) -> None:
    text = data.draw(st.text(max_size=20))
    ids = tokenizer.encode(text)
    offsets = OffsetCounter(tokenizer).offsets(ids)
    for position, offset in enumerate(offsets):
        before = tokenizer.decode_bytes(ids[:position]).decode(errors="ignore")
        assert offset == len(before)


def test_offsets_count_on_across_calls_and_skip_special_tokens(tokenizer: Tokenizer) -> None:
    end = tokenizer.encode("<|im_end|>")
    counter = OffsetCounter(tokenizer, start=3)
    assert counter.offsets(tokenizer.encode("ab")) == [3, 4]
    assert counter.offsets([*end, *tokenizer.encode("c")]) == [5, 5]
    spelled = OffsetCounter(tokenizer, skip_special_tokens=False)
    assert spelled.offsets([*end, *tokenizer.encode("c")]) == [0, 10]


def test_shapes_of_the_three_formats(tokenizer: Tokenizer) -> None:
    names = TokenNames(tokenizer)
    a, b = tokenizer.encode("ab")
    entry = TokenLogprob(
        token_id=b, logprob=-2.0, sampling_logprob=-1.5, rank=2, top=((a, -0.5), (b, -2.0))
    )
    assert chat_logprobs([entry], names)["content"] == [
        {
            "token": "b",
            "logprob": -2.0,
            "bytes": [98],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "b", "logprob": -2.0, "bytes": [98]},
            ],
            "sampling_logprob": -1.5,
        }
    ]
    assert completion_logprobs([None, entry], [0, 1], names, ids=[a, b]) == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -2.0],
        "top_logprobs": [None, {"a": -0.5, "b": -2.0}],
        "text_offset": [0, 1],
        "sampling_logprobs": [None, -1.5],
    }
    assert prompt_logprobs([None, entry], names) == [
        None,
        {
            str(b): {"logprob": -2.0, "rank": 2, "decoded_token": "b"},
            str(a): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]


def test_the_token_itself_is_among_its_alternatives(tokenizer: Tokenizer) -> None:
    a, b = tokenizer.encode("ab")
    entry = TokenLogprob(token_id=b, logprob=float("-inf"), top=((a, 0.0),))
    wire = completion_logprobs([entry], [0], TokenNames(tokenizer), ids=[b])
    assert wire["top_logprobs"] == [{"a": 0.0, "b": LOWEST}]
