"""C7: a fine-tuning run that was killed and resumed has the same bits as one that was not.

Real processes run `lockstep sft` and are killed by SIGKILL at random instants; with a checkpoint at
every step most of their time goes into saving, so saves are hit too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.core.files import sha256_of

NUM_STEPS = 18
LAST = f"checkpoints/checkpoint-{NUM_STEPS}"
KEPT = (f"{LAST}/*.safetensors", f"{LAST}/state.json")
"""What is compared beside exported weights: the last checkpoint's tensors and data position."""
CLOCKS = ("step_time", "tokens_per_second")


@pytest.fixture(scope="module")
def model_folder(
    tmp_path_factory: pytest.TempPathFactory,
    save_tiny_model: Callable[..., None],
    byte_pieces: list[str],
) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, pieces=byte_pieces)
    return folder


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    records = [{"prompt": f"{n}+{n}=", "completion": str(2 * n) * (n % 4 + 1)} for n in range(30)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


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
    runs, tmp_path: Path, model_folder: Path, data_file: Path, precision: str, method: str
) -> None:
    arguments = settings(model_folder, data_file, precision, method)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    runs.finish([*arguments, "--out", str(whole)])
    runs.kill_and_resume(arguments, killed, kills=3, steps=6, delay_s=0.05)
    assert runs.digests(killed, *KEPT) == runs.digests(whole, *KEPT)
    rows = runs.metrics(killed, clocks=CLOCKS)
    assert rows == runs.metrics(whole, clocks=CLOCKS)
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))


def test_one_flipped_bit_in_a_checkpoint_is_seen(
    runs, tmp_path: Path, model_folder: Path, data_file: Path
) -> None:
    """The comparison above would fail if resuming lost as little as the lowest bit of a weight."""
    arguments = [*settings(model_folder, data_file, "fp32", "lora"), "--out"]
    whole, flipped = tmp_path / "whole", tmp_path / "flipped"
    runs.finish([*arguments, str(whole)])
    shutil.copytree(whole, flipped)
    shutil.rmtree(flipped / LAST)
    checkpoint = flipped / "checkpoints" / f"checkpoint-{NUM_STEPS - 1}"
    weights = checkpoint / "parameters.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values())).view(torch.int32)[0, 0] ^= 1
    save_file(tensors, weights)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][weights.name]["sha256"] = sha256_of(weights)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    runs.finish([*arguments, str(flipped), "--resume"])
    kept, changed = runs.digests(whole, *KEPT), runs.digests(flipped, *KEPT)
    assert changed.keys() == kept.keys()
    assert changed[f"{LAST}/parameters.safetensors"] != kept[f"{LAST}/parameters.safetensors"]
