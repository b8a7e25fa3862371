"""C7: a fine-tuning run that was killed and resumed has the same bits as one that was not.

Real processes run `lockstep sft` and are killed by SIGKILL at random instants; with a checkpoint at
every step most of their time goes into saving, so saves are hit too.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from lockstep.cli.main import run
from lockstep.core.files import sha256_of
from lockstep.core.model_config import ModelConfig
from lockstep.core.run_folder import read_metrics
from lockstep.models.export import save_hf_folder
from lockstep.models.llama import Llama
from lockstep.text.tokenizer import Tokenizer, TokenizerFiles

NUM_STEPS = 18
NUM_KILLS = 3
CLOCKS = ("step_time", "tokens_per_second")
"""Metrics that tell the time of day, as it were; all others must repeat."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pieces = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
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
            max_position=128,
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
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    records = [{"prompt": f"{n}+{n}=", "completion": str(2 * n) * (n % 4 + 1)} for n in range(30)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def start(arguments: list[str]) -> BaseProcess:
    """`lockstep` as a process of its own, forked from one that has only imported it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.train.sft", "lockstep.cli.sft"])
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
    """Hashes of the exported weights and of the last checkpoint's tensors and data position."""
    files = [*out.glob("model/*.safetensors"), *out.glob("adapter/*.safetensors")]
    checkpoint = out / "checkpoints" / f"checkpoint-{NUM_STEPS}"
    files += [*checkpoint.glob("*.safetensors"), checkpoint / "state.json"]
    return {str(file.relative_to(out)): sha256_of(file) for file in files}


def metrics(out: Path) -> list[dict[str, Any]]:
    rows = read_metrics(out / "metrics.jsonl")
    return [{key: row[key] for key in row if key not in CLOCKS} for row in rows]


def settings(model_folder: Path, data_file: Path, precision: str, method: str) -> list[str]:
    """A command line but for --out: several micro-batches a step, epochs that end in mid-run."""
    arguments = ["sft", "--model", str(model_folder), "--data", str(data_file)]
    arguments += ["--eval-data", str(data_file), "--eval-every", "9", "--precision", precision]
    arguments += ["--max-length", "32", "--micro-batch-tokens", "32", "--global-batch-size", "4"]
    arguments += ["--epochs", "10", "--max-steps", str(NUM_STEPS), "--save-every", "1"]
    arguments += ["--learning-rate", "1e-2", "--warmup-steps", "3", "--weight-decay", "0.1"]
    return [*arguments, "--full"] if method == "full" else [*arguments, "--lora-r", "4"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_killed_run_resumes_to_the_same_bits(
    tmp_path: Path, model_folder: Path, data_file: Path, precision: str, method: str
) -> None:
    arguments = settings(model_folder, data_file, precision, method)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start([*arguments, "--out", str(whole)]))

    dice = random.Random()  # another instant every time: what a failure prints repeats it
    for _ in range(NUM_KILLS):
        steps, delay_s = dice.randrange(0, 6), dice.uniform(0.0, 0.05)
        print(f"kill after {steps} steps and {delay_s:.4f} s")
        process = start([*arguments, "--out", str(killed), "--resume"])
        kill_after(process, killed, steps=steps, delay_s=delay_s)
    finish(start([*arguments, "--out", str(killed), "--resume"]))

    assert digests(killed) == digests(whole)
    assert metrics(killed) == metrics(whole)
    assert [row["step"] for row in metrics(killed)] == list(range(NUM_STEPS + 1))


def test_one_flipped_bit_in_a_checkpoint_is_seen(
    tmp_path: Path, model_folder: Path, data_file: Path
) -> None:
    """The comparison above would fail if resuming lost as little as the lowest bit of a weight."""
    arguments = [*settings(model_folder, data_file, "fp32", "lora"), "--out"]
    whole, flipped = tmp_path / "whole", tmp_path / "flipped"
    finish(start([*arguments, str(whole)]))
    shutil.copytree(whole, flipped)
    shutil.rmtree(flipped / "checkpoints" / f"checkpoint-{NUM_STEPS}")
    checkpoint = flipped / "checkpoints" / f"checkpoint-{NUM_STEPS - 1}"
    weights = checkpoint / "parameters.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values())).view(torch.int32)[0, 0] ^= 1
    save_file(tensors, weights)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][weights.name]["sha256"] = sha256_of(weights)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    finish(start([*arguments, str(flipped), "--resume"]))
    assert digests(flipped).keys() == digests(whole).keys()
    last = f"checkpoints/checkpoint-{NUM_STEPS}/parameters.safetensors"
    assert digests(flipped)[last] != digests(whole)[last]
