from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.text.detokenizer import IncrementalDetokenizer, StopMatcher
from lockstep.text.tokenizer import Tokenizer


def cut(data: st.DataObject, items: list[int] | str) -> list[list[int] | str]:
    """Split into pieces at random places, empty pieces included."""
    places = sorted(data.draw(st.lists(st.integers(0, len(items)), max_size=6)))
    return [items[a:b] for a, b in zip([0, *places], [*places, len(items)], strict=True)]


@given(data=st.data(), skip=st.booleans(), is_continuation=st.booleans())
def test_deltas_add_up_to_the_whole(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool, is_continuation: bool
) -> None:
    """Any ids in any pieces, most of them not valid UTF-8."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=30))
    stream = IncrementalDetokenizer(
        tokenizer, skip_special_tokens=skip, is_continuation=is_continuation
    )
    text = "".join(stream.push(piece) for piece in cut(data, ids)) + stream.finish()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip, is_continuation=is_continuation)


@given(text=st.text(st.sampled_from("ab é北🙂\u0301"), max_size=12))
def test_no_delta_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    stream = IncrementalDetokenizer(tokenizer)
    deltas = [stream.push([i]) for i in tokenizer.encode(text)]
    assert "\ufffd" not in "".join(deltas)
    assert "".join(deltas) == text
    assert stream.finish() == ""


def test_an_unfinished_character_shows_at_the_end_only(byte_level: Tokenizer) -> None:
    ids = [byte_level.token_id(char) for char in ("ð", "Ł", "Ļ")]  # three of an emoji's four bytes
    stream = IncrementalDetokenizer(byte_level)
    assert [stream.push([i]) for i in ids] == ["", "", ""]
    assert stream.finish() == "\ufffd" == byte_level.decode(ids)


def expected_cut(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The specification: read character by character until a stop string ends here."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


letters = st.sampled_from("ab")


@given(
    data=st.data(),
    text=st.text(letters, max_size=16),
    stops=st.lists(st.text(letters, min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_text_is_cut_at_the_first_stop_string(
    data: st.DataObject, text: str, stops: list[str], include: bool
) -> None:
    matcher = StopMatcher(stops, include=include)
    emitted = "".join(matcher.push(piece) for piece in cut(data, text)) + matcher.finish()
    assert (emitted, matcher.matched) == expected_cut(text, stops, include=include)


@given(text=st.text(letters, max_size=16), stop=st.text(letters, min_size=1, max_size=4))
@example(text="aab", stop="ab")
def test_nothing_is_held_back_longer_than_it_must(text: str, stop: str) -> None:
    matcher = StopMatcher([stop])
    emitted = ""
    for end in range(1, len(text) + 1):
        emitted += matcher.push(text[end - 1])
        if matcher.matched is None:
            held = text[len(emitted) : end]
            assert stop.startswith(held)
            assert not any(stop.startswith(text[start:end]) for start in range(len(emitted))), (
                "a suffix of what was emitted begins the stop string"
            )


def test_without_stops_everything_passes_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == "abc"
    assert matcher.finish() == ""
    assert matcher.matched is None


def test_after_a_match_everything_is_dropped() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("text EN") == "text "
    assert matcher.push("D and more") == ""
    assert matcher.push("even more") == ""
    assert matcher.finish() == ""
    assert matcher.matched == "END"
