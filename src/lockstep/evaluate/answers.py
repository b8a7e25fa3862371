"""From completion to answer, and from answer to right or wrong.

Extraction is one of three stated rules; matching one of two. What is normalised, and nothing else:
- exact: Unicode NFKC, case folded, runs of white space become one space, surrounding white space,
  quotes and one closing full stop removed;
- numeric: both are read as numbers (thousands separators, a leading currency sign and a trailing
  per cent sign are dropped, fractions `a/b` are divided exactly); equal if within 1e-6 relative.
Semantic equivalence (symbolic maths, a judge) is not attempted here.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import Literal

Extraction = Literal["whole", "tag", "number"]
Match = Literal["exact", "numeric"]

RELATIVE_TOLERANCE = Fraction(1, 10**6)

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|[-+]?\.\d+")
_CURRENCY = re.compile(r"^([-+]?)[$€£]")
# At most three digits of exponent: Fraction("1e999999999") would compute that many digits.
_PARSABLE = re.compile(r"[-+]?(?:\d+/\d+|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?)")
_QUOTES = "\"'`\u2018\u2019\u201c\u201d"


def extract_answer(completion: str, rule: Extraction) -> str | None:
    """The answer in `completion`; None if the rule finds none (an empty answer counts as none).

    whole: all of it, stripped. tag: inside the last `<answer>...</answer>`. number: the last one.
    """
    if rule == "whole":
        answer = completion.strip()
    else:
        found = (_TAG if rule == "tag" else _NUMBER).findall(completion)
        answer = found[-1].strip() if found else ""
    return answer or None


def is_match(answer: str | None, expected: str, rule: Match) -> bool:
    """Whether `answer` equals `expected` after the normalisation the module describes."""
    if answer is None:
        return False
    if rule == "exact":
        return normalise(answer) == normalise(expected)
    number, wanted = parse_number(answer), parse_number(expected)
    if number is None or wanted is None:
        return False
    return abs(number - wanted) <= RELATIVE_TOLERANCE * abs(wanted)


def normalise(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.removesuffix(".").strip(_QUOTES + " ").removesuffix(".")


def parse_number(text: str) -> Fraction | None:
    """`text` as an exact number, or None if it is not one."""
    cleaned = text.strip().removesuffix(".").removesuffix("%").strip().replace(",", "")
    cleaned = _CURRENCY.sub(r"\1", cleaned)
    if not _PARSABLE.fullmatch(cleaned):
        return None
    try:
        return Fraction(cleaned)
    except (ValueError, ZeroDivisionError):
        return None
