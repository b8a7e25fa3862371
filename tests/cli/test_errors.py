from __future__ import annotations

import pytest

from lockstep.cli.errors import exit_code_of
from lockstep.core.errors import CheckpointError


def fail(error: BaseException) -> int:
    raise error


def test_a_user_error_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCKSTEP_TRACEBACK", raising=False)
    assert exit_code_of(lambda: fail(CheckpointError("model.safetensors is cut off"))) == 2
    captured = capsys.readouterr()
    assert captured.err == "lockstep: model.safetensors is cut off\n"
    assert captured.out == ""


def test_the_trace_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_TRACEBACK", "1")
    with pytest.raises(CheckpointError):
        exit_code_of(lambda: fail(CheckpointError("x")))


def test_an_interrupt_exits_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code_of(lambda: fail(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "lockstep: interrupted\n"


def test_our_own_bugs_keep_their_trace() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_code_of(lambda: 1 // 0)


def test_success_passes_the_code_through() -> None:
    assert exit_code_of(lambda: 0) == 0
    assert exit_code_of(lambda: 3) == 3
