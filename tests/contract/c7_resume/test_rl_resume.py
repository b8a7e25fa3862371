"""C7: an RL run that was killed and resumed has the same bits as one that was not.

Real processes run `lockstep rl` and are killed by SIGKILL at random instants: while drawing,
training, measuring or saving. Prompts and noise are functions of (seed, step), so the resumed run
must draw the very tokens the dead one would have drawn: the trajectories are compared too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

NUM_STEPS = 10
UPDATES_PER_ROLLOUT = 2
LAST = f"checkpoints/checkpoint-{NUM_STEPS * UPDATES_PER_ROLLOUT}"
KEPT = (f"{LAST}/*.safetensors", f"{LAST}/state.json", "trajectories/*", "evaluations/*/*")
"""What is compared beside exported weights: the last checkpoint, trajectories, answers."""
REWARD = """
def digits(prompts, completions, **columns):
    return [sum(map(str.isdigit, text)) / 3 for text in completions]
"""
CLOCKS = ("step_time", "time/rollout", "time/update")


@pytest.fixture(scope="module")
def model_folder(
    tmp_path_factory: pytest.TempPathFactory, save_tiny_model: Callable[..., None]
) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, pieces="0123456789+=")
    return folder


@pytest.fixture(scope="module")
def task_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums to train and to measure on, and a reward that every rollout gets some of."""
    folder = tmp_path_factory.mktemp("task")
    for name, numbers in (("train", range(7)), ("held_out", range(7, 10))):
        items = [{"prompt": f"{a}+{b}=", "answer": str(b)} for a in numbers for b in range(10)]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, items)))
    (folder / "rewards.py").write_text(REWARD)
    return folder


@pytest.mark.parametrize(("method", "precision"), [("lora", "bf16"), ("full", "fp32")])
def test_a_killed_run_resumes_to_the_same_bits(
    runs,
    tmp_path: Path,
    model_folder: Path,
    task_folder: Path,
    method: str,
    precision: str,
) -> None:
    arguments = ["rl", "--model", str(model_folder)]
    arguments += ["--task", f"free_answer:{task_folder}/train.jsonl"]
    arguments += ["--eval-task", f"free_answer:{task_folder}/held_out.jsonl", "--eval-every", "4"]
    arguments += ["--eval-items", "10", "--style", "text", "--precision", precision]
    arguments += ["--prompts-per-step", "6", "--samples-per-prompt", "4", "--max-tokens", "3"]
    arguments += ["--steps", str(NUM_STEPS), "--save-every", "1", "--learning-rate", "1e-2"]
    arguments += ["--updates-per-rollout", str(UPDATES_PER_ROLLOUT), "--kl-beta", "0.05"]
    arguments += ["--temperature", "0.9", "--micro-batch-tokens", "64"]
    arguments += ["--reward", f"{task_folder}/rewards.py:digits"]
    arguments += ["--full"] if method == "full" else ["--lora-r", "4"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    runs.finish([*arguments, "--out", str(whole)])
    runs.kill_and_resume(arguments, killed, kills=3, steps=4, delay_s=0.1)
    assert runs.digests(killed, *KEPT) == runs.digests(whole, *KEPT)
    rows = runs.metrics(killed, clocks=CLOCKS)
    assert rows == runs.metrics(whole, clocks=CLOCKS)
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    assert any(row["reward_std"] > 0 for row in rows[1:]), "nothing was learned from"
    assert all(row["sampling/max_ratio_deviation"] == 0.0 for row in rows[1:])
