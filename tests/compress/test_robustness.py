"""Crashes and wrong inputs of `lockstep quantize`, as a user meets them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.cli.errors import exit_code_of
from lockstep.cli.main import run

Arguments = Callable[..., list[str]]


@pytest.fixture
def arguments(tiny_model: Path, text_file: Path, tmp_path: Path) -> Arguments:
    """The command that works, with options added or replaced."""

    def make(
        model: str = str(tiny_model), out: str = str(tmp_path / "out"), **given: str
    ) -> list[str]:
        options = {
            "scheme": "int8",
            "calibration": str(text_file),
            "num-sequences": "4",
            "sequence-length": "32",
            "held-out-sequences": "2",
        } | {name.replace("_", "-"): value for name, value in given.items()}
        flags = [part for name, value in options.items() for part in (f"--{name}", value) if part]
        return [sys.executable, "-m", "lockstep.cli", "quantize", model, out, *flags]

    return make


def test_a_killed_run_leaves_nothing_under_the_name(arguments: Arguments, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(
        arguments(scheme="int4", num_sequences="120"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".out.*/states-*/quantized")):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not out.exists()
    done = subprocess.run(arguments(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (out / "quantization.json").is_file()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "no-such-model"}, "neither a folder nor a file"),
        ({"out": "{full}"}, "exists and is not empty"),
        ({"scheme": "int3"}, "int3"),
        ({"method": "awq"}, "int8 cannot be made by awq"),
        ({"group_size": "64"}, "one scale a channel"),
        ({"calibration": "missing.jsonl"}, "missing.jsonl"),
        ({"calibration": "none"}, "needs calibration text"),
        ({"sequence_length": "1"}, "sequence_length must be 2 or more"),
        ({"num_sequences": "100000"}, "give more text"),
        ({"max_perplexity_increase": "much"}, "must be a share such as 1% or 0.01"),
        ({"damping": "7"}, "damping must be between 0 and 1"),
        ({"min_agreement": "90"}, "min_agreement must be from 0 to 1"),
        ({"kv_cache_dtype": "int8"}, "--check-only"),
    ],
)
def test_wrong_inputs_get_one_sentence(
    arguments: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    says: str,
) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    changes = {name: value.format(full=full) for name, value in changes.items()}
    command = arguments(**changes)[3:]
    assert exit_code_of(lambda: run(command)) == 2
    message = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert says in message
    assert len(message) < 400
    assert not (tmp_path / "out").exists()
