from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lockstep.core.records import SampleDelta, TokenLogprob
from lockstep.serve.streams import DeltaBuffer


def delta(**fields: Any) -> SampleDelta:
    whole = {"request_id": "r", "index": 0, "text": "", "token_ids": (), "logprobs": ()} | fields
    return SampleDelta(**whole)


PIECES = st.lists(
    st.builds(
        lambda text, ids, cached: delta(
            text=text,
            token_ids=tuple(ids),
            logprobs=tuple(TokenLogprob(token_id=i, logprob=-1.0) for i in ids),
            num_cached_tokens=cached,
        ),
        st.text(max_size=3),
        st.lists(st.integers(0, 9), max_size=3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=8,
)


@given(pieces=PIECES, cuts=st.sets(st.integers(1, 7)))
def test_how_often_the_buffer_is_read_does_not_show_in_the_concatenation(
    pieces: list[SampleDelta], cuts: set[int]
) -> None:
    whole = joined(pieces)
    bounds = [0, *sorted(cut for cut in cuts if cut < len(pieces)), len(pieces)]
    parts = [joined(pieces[low:high]) for low, high in pairwise(bounds)]
    assert joined(parts) == whole
    assert whole.text == "".join(piece.text for piece in pieces)


def test_what_only_the_first_or_last_delta_has_is_kept() -> None:
    first = delta(prompt_logprobs=(None,), num_cached_tokens=5)
    last = delta(finish_reason="stop", stop_reason="x", seed=9)
    whole = joined([first, delta(text="a"), last])
    assert whole.prompt_logprobs == (None,)
    assert (whole.finish_reason, whole.stop_reason, whole.seed) == ("stop", "x", 9)
    assert whole.num_cached_tokens == 5


def joined(pieces: list[SampleDelta]) -> SampleDelta:
    buffer = DeltaBuffer()
    for piece in pieces:
        buffer.push(piece)
    return buffer.joined()
