from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import pytest

from lockstep.core.errors import ConfigError, DataError
from lockstep.core.run_folder import RunFolder, as_json, git_revision, read_metrics


class Precision(Enum):
    BF16 = "bf16"


@dataclass(frozen=True, kw_only=True)
class Inner:
    path: Path = Path("a/b")


@dataclass(frozen=True, kw_only=True)
class Config:
    inner: Inner = field(default_factory=Inner)
    precision: Precision = Precision.BF16
    targets: tuple[str, ...] = ("q_proj", "v_proj")


def test_config_is_written_resolved_and_read_back(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "runs" / "one") as run:
        run.write_config(Config())
        assert run.read_config() == {
            "inner": {"path": "a/b"},
            "precision": "bf16",
            "targets": ["q_proj", "v_proj"],
        }


def test_environment_names_the_machine_and_the_code(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_environment()
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["hardware"]["num_cpus"] >= 1
    assert environment["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["git"] == git_revision()
    assert environment["command"] == sys.argv


def test_metrics_are_read_back_in_order(tmp_path: Path) -> None:
    records = [{"step": i, "loss": 1 / (i + 1), "note": "é\n"} for i in range(5)]
    with RunFolder(tmp_path) as run:
        for record in records:
            run.append_metrics(record)
            assert read_metrics(run.metrics_path) == records[: record["step"] + 1]


def test_a_torn_last_line_is_skipped_and_cut_off_before_the_next_append(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.append_metrics({"step": 0})
    run.close()
    with run.metrics_path.open("ab") as stream:
        stream.write(b'{"step": 1, "lo')
    assert read_metrics(run.metrics_path) == [{"step": 0}]
    run.append_metrics({"step": 1})
    assert read_metrics(run.metrics_path) == [{"step": 0}, {"step": 1}]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(DataError, match="line 2"):
        read_metrics(path)


def test_resuming_forgets_the_steps_that_will_run_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.rewind(before_step=0)  # nothing there yet
    run.append_metrics({"event": "start"})
    for step in range(6):
        run.append_metrics({"step": step})
    run.rewind(before_step=4)
    run.append_metrics({"step": 4, "again": True})
    kept = read_metrics(run.metrics_path)
    assert kept == [
        {"event": "start"},
        *({"step": i} for i in range(4)),
        {"step": 4, "again": True},
    ]


def test_metrics_survive_kill_9(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib\n"
        "from lockstep.core.run_folder import RunFolder\n"
        "run = RunFolder(pathlib.Path(sys.argv[1]))\n"
        "for step in range(100): run.append_metrics({'step': step})\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 100


def test_a_file_in_the_way_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="needs a folder of its own"):
        RunFolder(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        RunFolder(tmp_path / "empty").read_config()


def test_git_revision_of_a_repository_and_of_none(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "HOME": str(tmp_path)}
    who |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b", "PATH": os.environ["PATH"]}
    for command in ("init -q", "add file", "commit -qm x"):
        (tmp_path / "file").write_text("1")
        subprocess.run(["git", *command.split()], cwd=tmp_path, env=who, check=True)
    clean = git_revision(tmp_path)
    assert clean is not None
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert git_revision(tmp_path) == {**clean, "dirty": True}


def test_as_json_leaves_json_values_alone() -> None:
    value = {"a": [1, 2.5, None, True, "x"]}
    assert as_json(value) == value
    assert as_json({1: (Path("x"),)}) == {"1": ["x"]}
