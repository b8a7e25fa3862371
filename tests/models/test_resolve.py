from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.core.errors import CheckpointError
from lockstep.models.resolve import resolve_model


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve_model(tmp_path).format == "hf"
    found = resolve_model(str(file))
    assert (found.name, found.path, found.format) == (str(file), file, "gguf")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    found = resolve_model("~/m")
    assert (found.name, found.path) == ("~/m", tmp_path / "m")


def test_nothing_there_lists_what_is_known() -> None:
    with pytest.raises(CheckpointError, match=r"no model 'nope': .* nor one of smollm2, qwen2.5"):
        resolve_model("nope")


def test_part_of_a_folder_names_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="give its folder"):
        resolve_model(file)


def test_resolving_does_not_import_torch() -> None:
    code = "import sys, lockstep.models.resolve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
