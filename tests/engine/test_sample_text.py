"""How a sample ends, and what of its text is shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.core.sampling import SamplingParams
from lockstep.engine.sample_text import SampleText
from lockstep.text.tokenizer import Tokenizer

FIXTURE_IS_READ_ONLY = settings(deadline=None, max_examples=60)


def run(tokenizer, tokens, *, max_new_tokens=100, eos=(258,), **params):
    """(text, finish reason, stop reason, number of tokens taken)."""
    sample = SampleText(
        SamplingParams(max_tokens=100, **params),
        tokenizer=tokenizer,
        eos_token_ids=eos,
        max_new_tokens=max_new_tokens,
    )
    text = ""
    for taken, token in enumerate(tokens, 1):
        growth = sample.push(token)
        text += growth.text
        if growth.finish_reason is not None:
            return text, growth.finish_reason, growth.stop_reason, taken
    return text, None, None, len(tokens)


@pytest.fixture
def ids(tokenizer: Tokenizer):
    return tokenizer.encode


def test_end_of_sequence_ends_it_without_a_stop_reason(tokenizer, ids):
    assert run(tokenizer, [*ids("hi"), 258, *ids("more")]) == ("hi", "stop", None, 3)


def test_ignored_end_of_sequence_does_not(tokenizer, ids):
    got = run(tokenizer, [*ids("hi"), 258, *ids("x")], ignore_eos=True)
    assert got == ("hix", None, None, 4)


def test_a_stop_token_is_named_and_its_text_shown_only_on_request(tokenizer, ids):
    (z,) = ids("z")
    assert run(tokenizer, ids("abz"), stop_token_ids=(z,)) == ("ab", "stop", z, 3)
    shown = run(tokenizer, ids("abz"), stop_token_ids=(z,), include_stop_str_in_output=True)
    assert shown == ("abz", "stop", z, 3)


def test_a_stop_string_across_tokens_is_cut_off(tokenizer, ids):
    assert run(tokenizer, ids("one two."), stop=(" tw",)) == ("one", "stop", " tw", 6)
    shown = run(tokenizer, ids("one two."), stop=(" tw",), include_stop_str_in_output=True)
    assert shown == ("one tw", "stop", " tw", 6)


def test_text_held_back_for_a_stop_string_comes_when_it_ends_otherwise(tokenizer, ids):
    assert run(tokenizer, [*ids("ab"), 258], stop=("bc",)) == ("ab", "stop", None, 3)
    assert run(tokenizer, ids("ab"), stop=("bc",), max_new_tokens=2) == ("ab", "length", None, 2)


def test_stop_strings_count_only_after_min_tokens(tokenizer, ids):
    assert run(tokenizer, ids("ababx"), stop=("b",), min_tokens=3) == ("aba", "stop", "b", 4)


def test_an_unfinished_character_becomes_a_replacement_character(tokenizer, ids):
    first_half = ids("é")[:1]
    assert run(tokenizer, first_half, max_new_tokens=1) == ("\ufffd", "length", None, 1)


def test_a_stop_string_that_completes_with_the_last_token_wins_over_length(tokenizer, ids):
    assert run(tokenizer, ids("abc"), stop=("c",), max_new_tokens=3) == ("ab", "stop", "c", 3)


def test_without_a_tokenizer_there_is_no_text_but_ends_work():
    assert run(None, [1, 2, 258]) == ("", "stop", None, 3)


@given(data=st.data())
@FIXTURE_IS_READ_ONLY
def test_pieces_concatenate_to_the_text_of_the_whole_cut_at_the_first_stop(tokenizer, data):
    text = data.draw(st.text(alphabet="abé", max_size=12))
    stops = tuple(data.draw(st.lists(st.text(alphabet="abé", min_size=1, max_size=3), max_size=2)))
    got, reason, stop_reason, _ = run(tokenizer, [*tokenizer.encode(text), 258], stop=stops)
    found = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if found:
        assert text[: min(found)] == got + stop_reason
    else:
        assert (got, stop_reason) == (text, None)
    assert reason == "stop"
