"""The one folder a run leaves, in which every number of its report can be traced to a file.

    config.json        the resolved configuration
    environment.json   git revision, hardware, versions, command line
    metrics.jsonl      one record a line, appended as the run goes
    checkpoints/, trajectories/, report.html: written by whoever makes them

Whole files are replaced atomically. A metrics line is handed to the operating system before
`append_metrics` returns, so `kill -9` can at most tear the last one, and readers skip a torn last
line. (Power loss can lose more: metrics are not fsynced, checkpoints are.)
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError, DataError
from lockstep.core.files import remove_leftovers, write_bytes, write_json
from lockstep.core.hardware import detect_hardware, detect_versions

Record = dict[str, Any]


class RunFolder:
    """Opens `path` for one run, making it if need be. The owner of the run closes it."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; a run needs a folder of its own")
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._metrics: int | None = None

    @property
    def config_path(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def write_config(self, config: Any) -> None:
        """Record the resolved configuration, a dataclass or a mapping, as config.json."""
        write_json(self.config_path, as_json(config))

    def read_config(self) -> Record:
        """The configuration of the run that is in this folder."""
        if not self.config_path.is_file():
            raise ConfigError(f"{self.path} holds no run: it has no config.json")
        config: Record = json.loads(self.config_path.read_text())
        return config

    def write_environment(self) -> None:
        """Record what computes this run as environment.json."""
        write_json(
            self.path / "environment.json",
            {
                "command": sys.argv,
                "git": git_revision(),
                "hardware": as_json(detect_hardware()),
                "versions": as_json(detect_versions()),
            },
        )

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl; it survives a kill of this process."""
        if self._metrics is None:
            _drop_torn_line(self.metrics_path)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._metrics = os.open(self.metrics_path, flags, 0o644)
        os.write(self._metrics, _line(record))

    def rewind(self, *, before_step: int) -> None:
        """Go back: forget metrics of `before_step` and later, which a run resumed there writes
        again, and what a kill left half written anywhere in the folder.
        """
        self.close()
        remove_leftovers(self.path)
        if self.metrics_path.exists():
            kept = [r for r in read_metrics(self.metrics_path) if r.get("step", -1) < before_step]
            write_bytes(self.metrics_path, b"".join(map(_line, kept)))

    def close(self) -> None:
        """Let go of the metrics file; appending again reopens it."""
        if self._metrics is not None:
            os.close(self._metrics)
            self._metrics = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[Record]:
    """Every record of a JSONL file, leaving out a last line that was torn by a kill."""
    *lines, _torn = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from error
    return records


def git_revision(folder: Path | None = None) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None where `folder` is in no repository."""
    folder = folder or Path(__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changes)}


def as_json(value: Any) -> Any:
    """The value in JSON's types: dataclasses become objects, enums their values, paths strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_json(item) for item in value]
    if isinstance(value, Enum):
        return as_json(value.value)
    if isinstance(value, Path):
        return str(value)
    return value


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(as_json(record), ensure_ascii=False).encode() + b"\n"


def _drop_torn_line(path: Path) -> None:
    """Cut the file after its last newline, so that an append starts on a line of its own."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
