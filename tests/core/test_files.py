from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from lockstep.core import files


class Crash(Exception):
    """Stands for whatever ends a write half way."""


def test_json_round_trips_and_keeps_the_order_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "value.json"
    value = {"b": 1, "a": ["é", None, 1.5]}
    files.write_json(path, value)
    assert json.loads(path.read_text()) == value
    assert list(json.loads(path.read_text())) == ["b", "a"]
    assert "é" in path.read_text()
    assert path.read_bytes().endswith(b"\n")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_text(path, "old")

    def write_and_fail() -> None:
        with files.replacing(path) as temporary:
            temporary.write_text("half of the n")
            raise Crash

    with pytest.raises(Crash):
        write_and_fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_replaced_folder_holds_only_the_new_files(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for name in ("first", "second"):
        with files.replacing_folder(path) as folder:
            (folder / name).write_text(name)
            (folder / "nested").mkdir()
            (folder / "nested" / "x").write_text("x")
    assert sorted(os.listdir(path)) == ["nested", "second"]
    assert os.listdir(tmp_path) == ["checkpoint"]


def test_a_failed_folder_write_leaves_the_old_folder(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with files.replacing_folder(path) as folder:
        (folder / "weights").write_text("old")

    def write_and_fail() -> None:
        with files.replacing_folder(path) as folder:
            (folder / "weights").write_text("new")
            raise Crash

    with pytest.raises(Crash):
        write_and_fail()
    assert (path / "weights").read_text() == "old"
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("num_bytes", [0, 1, (1 << 20) - 1, 1 << 20, (2 << 20) + 3])
def test_sha256_is_the_files_and_every_byte_is_reported(tmp_path: Path, num_bytes: int) -> None:
    data = bytes(i % 251 for i in range(1000)) * (num_bytes // 1000 + 1)
    path = tmp_path / "file"
    path.write_bytes(data[:num_bytes])
    pieces: list[int] = []
    digest = files.sha256_of(path, on_bytes=pieces.append)
    assert digest == hashlib.sha256(data[:num_bytes]).hexdigest()
    assert sum(pieces) == num_bytes


def test_leftovers_of_a_kill_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    kept = ["deep/.env", "deep/notes.tmp", "summary.json", ".moved.x.tmp", ".moved.x.old"]
    for name in ["deep/.summary.json.ab12.tmp", ".metrics.jsonl.x.tmp", *kept[:3]]:
        (tmp_path / name).write_text("x")
    for name in [".checkpoint.y.tmp", *kept[3:]]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text("x")
    files.remove_leftovers(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"deep", *kept, ".moved.x.tmp/weights", ".moved.x.old/weights"}
