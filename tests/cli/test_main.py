from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import __version__
from lockstep.cli import main
from lockstep.core.errors import ConfigError


def test_help_lists_every_command_and_imports_none() -> None:
    program = (
        "import sys; from lockstep.cli.main import run; run(['--help'])\n"
        "assert not [m for m in sys.modules if m == 'torch' or m.startswith('lockstep.cli.')\n"
        "            and m not in ('lockstep.cli.main', 'lockstep.cli.errors')]"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for name in main.COMMANDS:
        assert f" {name} " in done.stdout


@pytest.mark.parametrize("name", list(main.COMMANDS))
def test_every_command_has_help_and_needs_no_torch_for_it(name: str) -> None:
    program = (
        "import sys; from lockstep.cli.main import run\n"
        f"assert run([{name!r}, '--help']) == 0\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"Usage: lockstep {name}" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "unknown command 'bogus'; use one of demo, fetch"),
        (["--bogus"], "unknown command '--bogus'"),
        (["info", "--bogus"], "Unknown option"),
    ],
)
def test_a_wrong_command_line_is_a_user_error(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main.run(arguments)


def test_the_command_prints_one_sentence_and_exits_2() -> None:
    script = Path(sys.executable).with_name("lockstep")
    environment = {k: v for k, v in os.environ.items() if k != "LOCKSTEP_TRACEBACK"}
    done = subprocess.run(
        [script, "bogus"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("lockstep: unknown command 'bogus'")
    assert done.stdout == ""
