"""C7: an RL run that was killed and resumed has the same bits as one that was not.

Real processes run `lockstep rl` and are killed by SIGKILL at random instants: while drawing,
training, measuring or saving. Prompts and noise are functions of (seed, step), so the resumed run
must draw the very tokens the dead one would have drawn: the trajectories are compared too.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from lockstep.cli.main import run
from lockstep.core.files import sha256_of
from lockstep.core.model_config import ModelConfig
from lockstep.core.run_folder import read_metrics
from lockstep.models.export import save_hf_folder
from lockstep.models.llama import Llama
from lockstep.text.tokenizer import Tokenizer, TokenizerFiles

NUM_STEPS = 10
NUM_KILLS = 3
UPDATES_PER_ROLLOUT = 2
REWARD = """
def digits(prompts, completions, **columns):
    return [sum(map(str.isdigit, text)) / 3 for text in completions]
"""
CLOCKS = ("step_time", "time/rollout", "time/update")
"""Metrics that tell the time of day, as it were; all others must repeat."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pieces = ["<end>", *"0123456789+="]
    library = Library(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer = Tokenizer(
        TokenizerFiles(tokenizer_json=library.to_str(), config={"eos_token": "<end>"})
    )
    model = Llama(
        ModelConfig(
            vocab_size=len(pieces),
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            max_position=64,
            tie_embeddings=True,
            eos_token_ids=(0,),
            initializer_range=0.1,
        )
    )
    model.initialise(seed=0)
    folder = tmp_path_factory.mktemp("model")
    save_hf_folder(model, folder, tokenizer=tokenizer, dtype="float32", quiet=True)
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


def start(arguments: list[str]) -> BaseProcess:
    """`lockstep` as a process of its own, forked from one that has only imported it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.rl.run", "lockstep.cli.rl"])
    process = context.Process(target=run, args=(arguments,))
    process.start()
    return process


def finish(process: BaseProcess) -> None:
    process.join(timeout=100)
    assert process.exitcode == 0


def last_step(out: Path) -> int:
    path = out / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return rows[-1]["step"] if rows else 0


def kill_after(process: BaseProcess, out: Path, *, steps: int, delay_s: float) -> None:
    """SIGKILL, `delay_s` after the run has got `steps` further than where it started."""
    target = last_step(out) + steps
    while process.is_alive() and last_step(out) < target:
        time.sleep(0.001)
    time.sleep(delay_s)
    process.kill()
    process.join()


def digests(out: Path) -> dict[str, str]:
    """Hashes of exported weights, the last checkpoint, every trajectory and every answer."""
    last = out / "checkpoints" / f"checkpoint-{NUM_STEPS * UPDATES_PER_ROLLOUT}"
    files = [*out.glob("model/*.safetensors"), *out.glob("adapter/*.safetensors")]
    files += [*last.glob("*.safetensors"), last / "state.json"]
    files += [*out.glob("trajectories/*"), *out.glob("evaluations/*/*")]
    return {str(file.relative_to(out)): sha256_of(file) for file in files}


def metrics(out: Path) -> list[dict[str, Any]]:
    rows = read_metrics(out / "metrics.jsonl")
    return [{key: row[key] for key in row if key not in CLOCKS} for row in rows]


@pytest.mark.parametrize(("method", "precision"), [("lora", "bf16"), ("full", "fp32")])
def test_a_killed_run_resumes_to_the_same_bits(
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
    finish(start([*arguments, "--out", str(whole)]))

    dice = random.Random()  # another instant every time: what a failure prints repeats it
    for _ in range(NUM_KILLS):
        steps, delay_s = dice.randrange(0, 4), dice.uniform(0.0, 0.1)
        print(f"kill after {steps} steps and {delay_s:.4f} s")
        process = start([*arguments, "--out", str(killed), "--resume"])
        kill_after(process, killed, steps=steps, delay_s=delay_s)
    finish(start([*arguments, "--out", str(killed), "--resume"]))

    assert digests(killed) == digests(whole)
    assert metrics(killed) == metrics(whole)
    assert [row["step"] for row in metrics(killed)] == list(range(NUM_STEPS + 1))
    assert any(row["reward_std"] > 0 for row in metrics(whole)[1:]), "nothing was learned from"
    assert all(row["sampling/max_ratio_deviation"] == 0.0 for row in metrics(killed)[1:])
