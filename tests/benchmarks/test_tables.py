from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

Loader = Callable[[str], ModuleType]
MODEL = "SmolLM2-135M-Instruct"


def test_losses_and_gaps_are_in_the_readme_table(
    load_benchmark: Loader, result: dict[str, Any]
) -> None:
    text = load_benchmark("tables").markdown(result)
    assert [line for line in text.splitlines() if line.startswith("|")] == [
        "|  | precision | Lockstep | llama.cpp | OpenVINO | ours / best peer | of the limit |",
        "| --- | --- | --: | --: | --: | --: | --: |",
        "| prefill, 512 tokens, tokens/s | bf16 | 1,500 ±7% | 800 ±6% | 2,000 | 0.75 | 50% |",
        "| first token of 1,024, 960 cached, ms | bf16 | 40.0 | 160 | 80.0 | 0.50 | 50% |",
        "| peak memory serving, MB | int8 |  | 283 |  |  |  |",
    ]
    assert "2026-11-29 to 2026-11-30, commit 0123456:" in text
    assert "llama.cpp bf16 7 of 8" in text
    assert "Missing: vLLM bf16 (it did not start)." in text
    assert "269 MB at 35 GB/s" in text


def test_the_terminal_table_has_the_same_cells(
    load_benchmark: Loader, result: dict[str, Any]
) -> None:
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(load_benchmark("tables").terminal_table(result, MODEL))
    assert "1,500 ±7%" in captured.get()


def test_only_what_stands_between_the_markers_is_replaced(
    load_benchmark: Loader, tmp_path: Path
) -> None:
    tables = load_benchmark("tables")
    page = tmp_path / "README.md"
    page.write_text(f"before\n{tables.START}\nold\n{tables.END}\nafter\n")
    for _ in range(2):
        tables.write_between_markers(page, "new")
        assert page.read_text() == f"before\n{tables.START}\nnew\n{tables.END}\nafter\n"
    page.write_text("no markers")
    with pytest.raises(ValueError, match="add both lines"):
        tables.write_between_markers(page, "new")
    assert page.read_text() == "no markers"


def test_what_the_readme_says_of_make_bench_is_so(load_benchmark: Loader) -> None:
    root = Path(__file__).parents[2]
    readme, makefile = (root / "README.md").read_text(), (root / "Makefile").read_text()
    tables = load_benchmark("tables")
    before, start, rest = readme.partition(tables.START)
    assert start
    assert tables.END in rest
    assert "`make bench`" in before.partition("## Speed")[2]
    recipe = makefile.partition("\nbench:")[2].partition("\n\n")[0]
    assert "benchmarks/side_by_side.py" in recipe
    assert "$(BENCH_PAGE)" in recipe
    assert "BENCH_PAGE := --markdown README.md" in makefile


def test_every_peer_has_its_pinned_environment(load_benchmark: Loader) -> None:
    root = Path(__file__).parents[2]
    venvs = {s.venv for s in load_benchmark("systems").SYSTEMS if s.venv is not None}
    peers = (root / "Makefile").read_text().partition("\nPEERS := ")[2].partition("\n")[0].split()
    assert venvs == set(peers)
    for venv in venvs:
        lines = (root / f"benchmarks/peers/{venv}.txt").read_text().splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert pins
        assert all(line.count("==") == 1 for line in pins)
        assert [line for line in pins if line.startswith("torch==")] in ([], ["torch==2.13.0"])
