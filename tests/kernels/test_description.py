"""What `lockstep info kernels` says of this machine, and of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep import kernels
from lockstep.kernels import huge_pages, native_library


def test_every_instruction_set_has_a_reason_and_one_runs(isa):
    rows = kernels.describe().instruction_sets
    assert [row.name for row in rows if row.runs] == [isa]
    assert [row.name for row in rows] == list(native_library.ISAS)
    assert all(row.reason for row in rows)


def test_what_the_cpu_lacks_is_named(monkeypatch):
    monkeypatch.setattr(native_library, "isa", lambda: "portable")
    lacks = {"avx512bf16": ("avx512vnni", "avx512bf16"), "portable": ()}
    monkeypatch.setattr(native_library, "isas", lambda: lacks)
    reasons = {row.name: row.reason for row in kernels.describe().instruction_sets}
    assert reasons["avx512bf16"] == "this CPU lacks avx512vnni avx512bf16"
    assert reasons["avx2"] == "this library is built without it"
    assert reasons["portable"] == "the best this CPU runs"


def test_every_op_runs_something():
    ops = kernels.describe().ops
    assert {"linear", "rms_norm", "sample"} <= set(ops)
    assert all(op.runs == f"native {kernels.isa()}" for op in ops.values())


@pytest.mark.parametrize(
    ("setting", "words"),
    [("always [madvise] never", "used"), ("always madvise [never]", "switched off")],
)
def test_huge_pages_are_described(tmp_path: Path, setting: str, words: str):
    file = tmp_path / "enabled"
    file.write_text(setting)
    assert huge_pages.state(file).startswith(words)
    assert huge_pages.state(tmp_path / "none").startswith("not offered")
