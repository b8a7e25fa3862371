from __future__ import annotations

import io

import pytest

from lockstep.core.progress import Progress, format_rate, format_seconds


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_at_the_start_every_ten_seconds_and_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(stream=stream, clock=clock) as progress:
        task = progress.add("SFT", total=100, unit="steps")
        for step in range(100):
            clock.now_s += 0.5
            task.advance(note=f"loss {step}")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "SFT: 100 steps"
    assert lines[1] == "SFT: 20/100 steps, 2.0 steps/s, 40 s left, loss 19"
    assert lines[-1] == "SFT: 100/100 steps, 2.0 steps/s, done in 50 s, loss 99"
    assert len(lines) == 1 + 4 + 1


def test_unknown_and_unreached_totals() -> None:
    stream, clock = io.StringIO(), Clock()
    progress = Progress(stream=stream, clock=clock)
    task = progress.add("read", total=None, unit="rows")
    clock.now_s += 11
    task.advance(22)
    task.finish()
    task.finish()
    assert stream.getvalue().splitlines() == [
        "read: started",
        "read: 22 rows, 2.0 rows/s",
        "read: 22 rows, 2.0 rows/s, done in 11 s",
    ]


def test_track_passes_items_through() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=Clock())
    assert list(progress.track("abc", "letters", total=3)) == ["a", "b", "c"]
    assert "3/3 items" in stream.getvalue().splitlines()[-1]


def test_a_terminal_gets_bars_and_text_is_not_markup() -> None:
    stream = Terminal()
    with Progress(stream=stream) as progress:
        task = progress.add("SFT [red]", total=4, unit="steps")
        task.advance(3, note="loss [1]")
        progress.say("kept [as] is")
        task.finish()
    text = stream.getvalue()
    assert "SFT [red]" in text
    assert "loss [1]" in text
    assert "kept [as] is" in text


def test_quiet_says_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        with Progress(quiet=True, stream=stream) as progress:
            progress.say("no")
            progress.add("x", total=1).advance()
        assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (125, "2 min 5 s"), (3725, "1 h 2 min")]
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_format_rate_turns_over_below_one() -> None:
    assert format_rate(1234.56, "tokens") == "1,234.6 tokens/s"
    assert format_rate(0.25, "steps") == "4.0 s/step"
