from __future__ import annotations

import pytest

from lockstep import __version__
from lockstep.cli.main import run


def test_info_says_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info"]) == 0
    printed = capsys.readouterr().out
    for word in (__version__, "python", "torch", "processor", "instruction sets", "memory"):
        assert word in printed


def test_info_kernels_names_an_implementation_for_every_op(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["info", "kernels"]) == 0
    header, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert header.split() == ["op", "runs"]
    assert {"linear", "rms_norm", "attention_paged", "sample"} <= {row.split()[0] for row in rows}
    assert all(row.split()[1] in ("native", "reference") for row in rows)
