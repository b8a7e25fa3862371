from __future__ import annotations

from fractions import Fraction

import pytest

from lockstep.evaluate.answers import Extraction, extract_answer, is_match, parse_number


@pytest.mark.parametrize(
    ("completion", "rule", "answer"),
    [
        ("  42\n", "whole", "42"),
        ("   ", "whole", None),
        ("<answer>1</answer> no, <answer> 2\n</answer>", "tag", "2"),
        ("<answer>two\nlines</answer>", "tag", "two\nlines"),
        ("42", "tag", None),
        ("<answer></answer>", "tag", None),
        ("first 3, then -1,234.5 apples.", "number", "-1,234.5"),
        ("it is 3/4", "number", "3/4"),
        ("none", "number", None),
    ],
)
def test_extract_answer(completion: str, rule: Extraction, answer: str | None) -> None:
    assert extract_answer(completion, rule) == answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Paris.", "paris"),
        ('  "The  Hague" ', "the hague"),
        ("\u2018yes\u2019", "YES"),
        ("\uff11\uff12", "12"),  # full-width digits, by NFKC
    ],
)
def test_exact_match_normalises(answer: str, expected: str) -> None:
    assert is_match(answer, expected, "exact")


@pytest.mark.parametrize(
    ("answer", "expected"), [("Paris, France", "Paris"), ("12", "12.0"), ("naive", "na\u00efve")]
)
def test_exact_match_normalises_nothing_else(answer: str, expected: str) -> None:
    assert not is_match(answer, expected, "exact")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234", Fraction(1234)),
        ("-$3.50", Fraction(-7, 2)),
        ("$-3.50", Fraction(-7, 2)),
        ("12%", Fraction(12)),
        ("3/4", Fraction(3, 4)),
        ("1e3", Fraction(1000)),
        ("7.", Fraction(7)),
        ("1e999999999", None),
        ("1/0", None),
        ("twelve", None),
        ("", None),
    ],
)
def test_parse_number(text: str, number: Fraction | None) -> None:
    assert parse_number(text) == number


def test_numeric_match() -> None:
    assert is_match("0.3333333", "1/3", "numeric")
    assert not is_match("0.333", "1/3", "numeric")
    assert is_match("0", "0.0", "numeric")
    assert not is_match("about 3", "3", "numeric")
    assert not is_match(None, "3", "numeric")
