from __future__ import annotations

import json

import pytest

from lockstep import __version__
from lockstep.cli.main import run


def test_info_says_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info"]) == 0
    printed = capsys.readouterr().out
    for word in (__version__, "python", "torch", "processor", "instruction sets", "memory"):
        assert word in printed


def test_info_kernels_says_what_runs_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "kernels"]) == 0
    library, isas, ops = capsys.readouterr().out.split("\n\n")[:3]
    for word in ("library", "ABI", "CPU features", "threads", "huge pages"):
        assert word in library
    assert isas.split()[:4] == ["instruction", "set", "runs", "why"]
    assert [line.split()[1] for line in isas.splitlines()[1:]].count("yes") == 1
    header, *rows = ops.splitlines()
    assert header.split() == ["op", "runs"]
    assert {"linear", "rms_norm", "attention_paged", "sample"} <= {row.split()[0] for row in rows}
    assert all(row.split()[1] in ("native", "reference") for row in rows)


def test_info_kernels_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["info", "kernels", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["missing"] is None
    assert described["instruction_sets"][-1]["name"] == "portable"
    assert described["ops"]["linear"]["runs"].startswith("native ")
