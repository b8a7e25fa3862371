"""`lockstep rl`, `lockstep eval` and `lockstep eval compare`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli.main import run
from lockstep.core.errors import ConfigError, DataError

ASKED = ["--style", "text", "--max-tokens", "1", "--precision", "fp32"]


def test_train_measure_and_compare(toy, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    settings = tmp_path / "rl.toml"
    settings.write_text("steps = 25\nfull = true\nprompts-per-step = 16\nlearning-rate = 1e-3\n")
    task = ["--task", f"free_answer:{toy.train}", "--eval-task", f"free_answer:{toy.held_out}"]
    out = ["--out", str(tmp_path / "rl"), "--config", str(settings)]
    assert (
        run(["rl", "--model", str(toy.model), *task, *out, *ASKED, "--learning-rate", "8e-3"]) == 0
    )
    config = json.loads((tmp_path / "rl" / "config.json").read_text())
    assert config["loop"]["steps"] == 25
    assert config["optimizer"]["learning_rate"] == 8e-3  # the flag wins over the file

    for name, model in (("before", toy.model), ("after", tmp_path / "rl" / "model")):
        what = ["--free-answer", str(toy.held_out), "--out", str(tmp_path / name)]
        assert run(["eval", "--model", str(model), *what, *ASKED]) == 0
    capsys.readouterr()
    assert run(["eval", "compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 0
    said = capsys.readouterr().out
    assert "30 paired items" in said
    assert "exact McNemar" in said
    summary = json.loads((tmp_path / "after" / "summary.json").read_text())
    assert summary["estimates"]["accuracy"]["mean"] > 0.2
    assert summary["estimates"]["accuracy"]["method"] == "wilson"
    records = [json.loads(line) for line in (tmp_path / "after" / "results.jsonl").open()]
    assert all(len(record["token_ids"]) == 1 for record in records)


def test_multiple_choice_with_a_real_model(toy, tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    lines = [
        {"question": f"{n}+1=", "choices": ["1", "23", "4"], "answer": n % 3} for n in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    out = ["--out", str(tmp_path / "out"), "--style", "text"]
    assert run(["eval", "--model", str(toy.model), "--multiple-choice", str(path), *out]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert set(summary["estimates"]) == {"accuracy", "score", "acc_norm", "acc_bytes"}
    record = json.loads((tmp_path / "out" / "results.jsonl").open().readline())
    assert all(total < 0 for total in record["details"]["logprob_sums"])


def test_mistakes_are_found_before_a_model_is_loaded(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="exactly one of --task"):
        run(["eval", "--model", "no-such-model", *out])
    with pytest.raises(ConfigError, match="nothing to measure"):
        run(["eval", "--task", "reasoning_gym:chain_sum", *out])
    with pytest.raises(ConfigError, match="did you mean chain_sum"):
        run(["rl", "--model", "no-such-model", "--task", "reasoning_gym:chain_su", *out])
    with pytest.raises(DataError, match=r"holds no results\.jsonl"):
        run(["eval", "compare", str(tmp_path), str(tmp_path)])
    assert not (tmp_path / "out").exists()


def test_unknown_settings_are_refused_by_name(toy, tmp_path: Path) -> None:
    settings = tmp_path / "rl.toml"
    settings.write_text("step = 25\n")
    task = ["--task", f"free_answer:{toy.train}", "--out", str(tmp_path / "rl")]
    with pytest.raises(ConfigError, match="step"):
        run(["rl", "--model", str(toy.model), *task, "--config", str(settings)])
