"""The parent's side of a worker: start it, ask it, keep it stopped while others are measured."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
PATIENCE_S = 900


class WorkerError(RuntimeError):
    """A worker ended, or was silent for too long, instead of answering."""


class MissingError(RuntimeError):
    """The system has no such precision."""


class Worker:
    """One system at one precision in a process of its own.

    Between requests the process is stopped by SIGSTOP: a spinning thread pool of an idle system
    cannot slow the one being measured.
    """

    def __init__(
        self,
        script: str,
        *,
        python: Path,
        model: Path,
        precision: str,
        threads: int,
        log: Path,
        training: bool = False,
    ) -> None:
        self.name = f"{script} {precision}"
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [str(python), str(HERE / f"{script}.py"), "--model", str(model)]
        command += ["--precision", precision, "--threads", str(threads)]
        if training:
            command.append("--training")
        self.started_s = perf_counter()
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment,
            )
        try:
            loaded = self._answer()
        except WorkerError:
            self.close()
            raise
        if "unsupported" in loaded:
            self.close()
            raise MissingError(loaded["unsupported"])
        self._process.send_signal(signal.SIGSTOP)

    @property
    def peak_rss_bytes(self) -> int:
        """Most that was resident at any time, mapped files included."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """Wake the process, have it do one thing, and stop it again."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"op": op, **request}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
            raise WorkerError(f"{self.name} said nothing for {PATIENCE_S} s (see {self._log})")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            last = self._log.read_text().strip().splitlines()[-1:] or ["it said nothing"]
            raise WorkerError(f"{self.name} ended with {code}: {last[0]} (see {self._log})")
        answer: dict[str, Any] = json.loads(line)
        return answer
