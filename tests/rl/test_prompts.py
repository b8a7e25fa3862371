from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.core.errors import DataError
from lockstep.evaluate.tasks import load_environment
from lockstep.rl.prompts import PromptSource


@pytest.fixture
def small_task():
    """Sums of two digits: few distinct questions, so held-out ones come up in training."""
    return load_environment("reasoning_gym:chain_sum:max_digits=1,max_terms=2,min_digits=1")


def test_held_out_questions_are_never_trained_on(small_task) -> None:
    held_out = [small_task.item(i, split="held_out") for i in range(30)]
    source = PromptSource(small_task, seed=1, held_out=held_out)
    items = [item for step in range(5) for item in source.batch(step, num_prompts=20)]
    assert len(items) == 100
    assert not {str(item.prompt) for item in items} & {str(item.prompt) for item in held_out}
    assert source.num_passed_over > 0


def test_a_step_can_be_had_without_those_before_it(small_task) -> None:
    held_out = [small_task.item(i, split="held_out") for i in range(30)]
    first = PromptSource(small_task, seed=1, held_out=held_out)
    for step in range(3):
        first.batch(step, num_prompts=8)
    again = PromptSource(small_task, seed=1, held_out=held_out)
    assert again.batch(3, num_prompts=8) == first.batch(3, num_prompts=8)


def test_a_task_that_is_all_held_out_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": p, "answer": 1}) for p in "ab"))
    environment = load_environment(f"free_answer:{path}")
    held_out = [environment.item(i, split="held_out") for i in range(2)]
    with pytest.raises(DataError, match="too small"):
        PromptSource(environment, seed=0, held_out=held_out).batch(0, num_prompts=1)
