"""`lockstep serve` as a child process that never outlives its parent's interest in it.

Leaving the context stops the server whatever happened: asked with SIGTERM, then killed. A SIGTERM
to the demo itself is turned into an ordinary exit meanwhile, so that it takes the same way out.
"""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from urllib.parse import urlsplit

from lockstep.core.errors import LockstepError
from lockstep.core.progress import Progress

READY = re.compile(r"^ready: .* at (http://\S+)/v1$", re.MULTILINE)
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
KILL_AFTER_S = 10.0
EXIT_SIGTERM = 128 + signal.SIGTERM


class ServerError(LockstepError, RuntimeError):
    """The server did not start, or did not stop, as it should."""


class ServerProcess:
    """Starts when entered; its output goes to `log`."""

    def __init__(self, arguments: Sequence[str], *, log: Path) -> None:
        self.command = [sys.executable, "-m", "lockstep.cli", "serve", *arguments]
        self._log = log
        self.process: subprocess.Popen[bytes] | None = None
        self._old_handler: object = None
        self.url = ""

    def __enter__(self) -> ServerProcess:
        if threading.current_thread() is threading.main_thread():
            self._old_handler = signal.signal(signal.SIGTERM, _exit)
        # A key for some other server in the user's environment must not lock us out of ours.
        environment = {k: v for k, v in os.environ.items() if k != "LOCKSTEP_API_KEY"}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)  # type: ignore[arg-type]

    def wait_until_healthy(self, progress: Progress, *, timeout_s: float = START_TIMEOUT_S) -> str:
        """The server's URL once `/health` answers 200; ServerError if it ends or takes too long."""
        assert self.process is not None
        deadline_s = time.monotonic() + timeout_s
        bar = progress.add("server starts", total=None, unit="checks")
        while not self._is_healthy():
            if self.process.poll() is not None:
                raise ServerError(
                    f"the server ended with exit code {self.process.returncode} before it was "
                    f"ready; its last words: {self._last_line()}"
                )
            if time.monotonic() > deadline_s:
                raise ServerError(
                    f"the server was not ready within {timeout_s:g} s; see {self._log}"
                )
            time.sleep(0.2)
            bar.advance()
        bar.finish()
        return self.url

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Ask it to end with SIGTERM and return its exit code; nothing listens there any more."""
        assert self.process is not None
        self.process.terminate()
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ServerError(f"the server did not stop within {timeout_s:g} s") from None
        if self._is_healthy():
            raise ServerError(f"the server process has ended, but {self.url} still answers")
        return code

    def _is_healthy(self) -> bool:
        """It has said where it listens (the port may be one it chose), and answers there."""
        if not self.url:
            ready = READY.search(self._log.read_text(errors="replace"))
            if ready is None:
                return False
            self.url = ready[1]
        try:
            connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=5)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False

    def _last_line(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "none")


def _exit(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(EXIT_SIGTERM)
