from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.core.errors import DataError
from lockstep.evaluate.multiple_choice import evaluate_choices, read_choice_items
from lockstep.evaluate.prompts import PromptConfig

TEXT = PromptConfig(style="text", template="Q: {question}\nA:")


class FixedScores:
    """A completer whose continuations have given per-token logprobs."""

    model_name = "fixed"

    def __init__(self, logprobs: dict[str, list[float]]) -> None:
        self.logprobs = logprobs
        self.asked: list[tuple[str, str]] = []

    def score(self, pairs):
        self.asked += pairs
        return [self.logprobs[continuation] for _, continuation in pairs]

    def chat_prompt(self, messages):
        return f"[{messages[-1]['content']}]"


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_accuracy_and_both_normalisations(tmp_path: Path) -> None:
    # Sums: -2 (1 character), -3 (4 characters), -3.5 (3 characters, 5 bytes).
    path = write(
        tmp_path / "mc.jsonl",
        '{"question": "?", "choices": ["a", "long", "\u00fc\u00fcx"], "answer": 0}',
    )
    completer = FixedScores({" a": [-2.0], " long": [-1.0, -2.0], " \u00fc\u00fcx": [-3.5]})
    for answer, accuracy, norm, num_bytes in ((0, 1, 0, 0), (1, 0, 1, 0), (2, 0, 0, 1)):
        (item,) = read_choice_items(path)
        item = type(item)(**{**vars(item), "answer": answer})
        (result,) = evaluate_choices(completer, [item], TEXT)
        assert result.score == accuracy
        assert result.metrics == {"acc_norm": norm, "acc_bytes": num_bytes}
    assert completer.asked[0] == ("Q: ?\nA:", " a")
    assert result.details["logprob_sums"] == [-2.0, -3.0, -3.5]


def test_ties_go_to_the_first_choice(tmp_path: Path) -> None:
    path = write(tmp_path / "mc.jsonl", '{"question": "?", "choices": ["x", "y"], "answer": "y"}')
    completer = FixedScores({" x": [-1.0], " y": [-1.0]})
    (result,) = evaluate_choices(completer, read_choice_items(path), TEXT)
    assert (result.answer, result.score) == ("x", 0.0)


def test_chat_style_scores_the_bare_choice_after_the_template(tmp_path: Path) -> None:
    path = write(tmp_path / "mc.jsonl", '{"question": "?", "choices": ["x", "y"], "answer": "B"}')
    completer = FixedScores({"x": [-2.0], "y": [-1.0]})
    (result,) = evaluate_choices(completer, read_choice_items(path), PromptConfig())
    assert result.score == 1.0
    assert completer.asked == [("[?]", "x"), ("[?]", "y")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "?", "choices": ["x"], "answer": 0}', "at least 2 non-empty texts"),
        ('{"question": "?", "choices": ["x", ""], "answer": 0}', "at least 2 non-empty texts"),
        ('{"question": "?", "choices": ["x", "y"], "answer": 2}', "index from 0 to 1"),
        ('{"question": "?", "choices": ["x", "y"], "answer": "C"}', "or its letter, got 'C'"),
        ('{"question": 1, "choices": ["x", "y"], "answer": 0}', "question must be text, got 1"),
        ('{"choices": ["x", "y"], "answer": 0}', "lacks 'question'"),
    ],
)
def test_bad_items_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "bad.jsonl", line)
    with pytest.raises(DataError, match=message):
        read_choice_items(path)
