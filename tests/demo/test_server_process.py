"""The server is a child that never stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lockstep.core.progress import Progress
from lockstep.demo.server_process import EXIT_SIGTERM, ServerError, ServerProcess

PARENT = """
import sys, time
from pathlib import Path
from lockstep.demo.server_process import ServerProcess
with ServerProcess([sys.argv[1], "--port", "0"], log=Path(sys.argv[2])) as server:
    print(server.process.pid, flush=True)
    time.sleep(60)
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_leaving_with_an_error_stops_it(tiny_model: Path, tmp_path: Path) -> None:
    server = ServerProcess([str(tiny_model), "--port", "0"], log=tmp_path / "log")
    with pytest.raises(KeyboardInterrupt), server:
        raise KeyboardInterrupt
    assert server.process is not None
    assert server.process.returncode is not None


def test_a_terminated_demo_takes_its_server_along(tiny_model: Path, tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_model), str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.5)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(30) == EXIT_SIGTERM
    assert not is_running(pid)


def test_a_server_that_cannot_start_is_one_sentence(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "nothing"), "--port", "0"]
    with (
        ServerProcess(arguments, log=tmp_path / "log") as server,
        Progress(quiet=True) as progress,
        pytest.raises(ServerError, match="exit code 2 before it was ready; its last words: lock"),
    ):
        server.wait_until_healthy(progress)


def test_a_server_that_takes_too_long_is_one_sentence(tiny_model: Path, tmp_path: Path) -> None:
    with (
        ServerProcess([str(tiny_model), "--port", "0"], log=tmp_path / "log") as server,
        Progress(quiet=True) as progress,
        pytest.raises(ServerError, match=r"not ready within 0 s; see"),
    ):
        server.wait_until_healthy(progress, timeout_s=0)
