from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.core.environment import Grade
from lockstep.core.errors import ConfigError, DataError
from lockstep.evaluate.prompts import PromptConfig
from lockstep.evaluate.single_turn import SingleTurnEnvironment, TaskConfig
from lockstep.evaluate.tasks import load_environment
from lockstep.evaluate.verifiers import parse_weights

ITEM = '{"prompt": "Capital of France?", "answer": ["Paris", "City of Light"], "group": "geo"}\n'


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text(ITEM + '\n{"messages": [{"role": "user", "content": "1+1?"}], "answer": 2}\n')
    return path


def grade(environment: SingleTurnEnvironment, index: int, completion: str) -> Grade:
    episode = environment.start(environment.item(index, split="held_out"))
    turn = episode.step(completion)
    assert turn.grade is not None
    return turn.grade


def test_free_answers(questions: Path) -> None:
    environment = load_environment(f"free_answer:{questions}")
    assert environment.num_items == 2
    assert grade(environment, 0, " paris. ").is_correct
    assert grade(environment, 0, "City of light").is_correct
    assert not grade(environment, 0, "Lyon").is_correct
    assert grade(environment, 1, "2").is_correct
    item = environment.item(0, split="held_out")
    assert (item.item_id, item.group) == ("questions.jsonl:1", "geo")


def test_prompt_config(questions: Path) -> None:
    config = TaskConfig(prompt=PromptConfig(system_prompt="Be brief.", template="Q: {question} A:"))
    environment = load_environment(f"free_answer:{questions}", config)
    assert environment.item(0, split="train").prompt == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: Capital of France? A:"},
    )
    text = PromptConfig(style="text", system_prompt="Be brief.", template="Q: {question} A:")
    assert text.render("Who?") == "Be brief.\n\nQ: Who? A:"
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Who?"}]
    assert config.prompt.render(own) == tuple(own)
    with pytest.raises(ConfigError, match="once, got 0 times"):
        PromptConfig(template="no slot")


def test_rewards_are_a_weighted_sum_and_none_abstains(questions: Path, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(
        "def short(prompts, completions, **columns):\n"
        "    return [1.0 if len(c) < 10 else None for c in completions]\n"
    )
    rewards = {"correct": 1.0, f"{tmp_path}/rewards.py:short": 0.5}
    environment = load_environment(f"free_answer:{questions}", TaskConfig(rewards=rewards))
    assert grade(environment, 0, "Paris").reward == 1.5
    long = grade(environment, 0, "It may be Paris")
    assert (long.reward, dict(long.rewards)) == (0.0, {"correct": 0.0})


def test_weights_as_a_command_line_gives_them() -> None:
    given = ["correct", "answered=0.25", "my/file.py:f=2"]
    assert parse_weights(given) == {"correct": 1.0, "answered": 0.25, "my/file.py:f": 2.0}
    with pytest.raises(ConfigError, match="'much' is not a weight"):
        parse_weights(["correct=much"])


def test_a_broken_verifier_is_a_failed_grade(questions: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "def reward(prompts, completions, **columns): return [1/0]\n"
    )
    rewards = {f"{tmp_path}/broken.py:reward": 1.0}
    environment = load_environment(f"free_answer:{questions}", TaskConfig(rewards=rewards))
    failed = grade(environment, 0, "Paris")
    assert failed.error is not None
    assert "ZeroDivisionError" in failed.error
    assert failed.reward == 0.0
    assert failed.is_correct  # the task's own score does not depend on rewards


def test_no_opinion_at_all_is_a_failed_grade(questions: Path, tmp_path: Path) -> None:
    (tmp_path / "silent.py").write_text("def reward(prompts, completions, **c): return [None]\n")
    rewards = {f"{tmp_path}/silent.py:reward": 1.0}
    environment = load_environment(f"free_answer:{questions}", TaskConfig(rewards=rewards))
    assert grade(environment, 0, "Paris").error == "no verifier judged this completion"


@pytest.mark.parametrize(
    ("reward", "message"),
    [("exactly", "use correct, graded, answered"), ("no_such.py:f", "there is no file no_such.py")],
)
def test_unknown_rewards_are_refused(questions: Path, reward: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(f"free_answer:{questions}", TaskConfig(rewards={reward: 1.0}))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", ":1 is not JSON"),
        ("[1]", ":1 must be a JSON object, got list"),
        ('{"prompt": "x"}', "lacks 'answer'; it has prompt"),
        ('{"prompt": 3, "answer": 1}', "prompt must be text or a list of messages"),
        ('{"prompt": "x", "answer": []}', "empty list of answers"),
        ("", "holds no items"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(DataError, match=message):
        load_environment(f"free_answer:{path}")


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(ConfigError, match="task kind 'gym' is unknown"):
        load_environment("gym:x")
    with pytest.raises(DataError, match=r"cannot read /no/file\.jsonl"):
        load_environment("free_answer:/no/file.jsonl")


def test_line_separators_within_a_string_are_text(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"prompt": "a\u2028b\x85c", "answer": "x"}\n', encoding="utf-8")
    assert load_environment(f"free_answer:{path}").num_items == 1
