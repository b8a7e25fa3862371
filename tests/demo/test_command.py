"""`lockstep demo`, as a user types it; what it does is in test_run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli.main import run
from lockstep.core.errors import ConfigError


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="holds no demo; choose another folder with --out"):
        run(["demo", "--out", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_help_says_what_becomes_of_an_earlier_demo(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "an earlier demo there is replaced. [default: runs/demo]" in said
