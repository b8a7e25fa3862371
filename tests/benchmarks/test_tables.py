from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

Loader = Callable[[str], ModuleType]


def test_rows_hold_medians_spread_and_the_ratio_to_the_best_peer(
    load_benchmark: Loader, result: dict[str, Any]
) -> None:
    prefill, shipped, decode = load_benchmark("tables").rows_of(result)
    ours = prefill.speeds["Lockstep"]
    assert (ours.median, ours.low, ours.high) == pytest.approx((1024, 512 / 0.6, 1280))
    assert prefill.ratio == pytest.approx(0.6 / 0.5)
    assert prefill.share_of_limit == pytest.approx(0.5)
    assert (shipped.ratio, shipped.share_of_limit) == (None, None)
    assert decode.ratio == pytest.approx(0.5)


def test_losses_and_gaps_are_in_the_readme_table(
    load_benchmark: Loader, result: dict[str, Any]
) -> None:
    lines = load_benchmark("tables").markdown(result).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert table == [
        "| tokens/s | precision | Lockstep | llama.cpp | transformers | ours / best peer "
        "| of the limit |",
        "| --- | --- | --: | --: | --: | --: | --: |",
        "| prefill, 512 tokens | bf16 | 1,024 (853-1,280) | 853 (640-1,024) | 512 (256-512) "
        "| 1.20 | 50% |",
        "| decode, 8 streams | q4_1 |  | 256 (256-256) |  |  |  |",
        "| decode, 8 streams | fp32 | 128 (128-128) | 256 (256-256) |  | 0.50 |  |",
    ]
    assert "commit 0123456:" in lines[0]
    assert any("llama.cpp 7 of 8" in line for line in lines)


def test_the_terminal_table_has_the_same_cells(
    load_benchmark: Loader, result: dict[str, Any]
) -> None:
    console = Console(width=160, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(load_benchmark("tables").terminal_table(result))
    assert "1,024 (853-1,280)" in captured.get()


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
    assert "benchmarks/side_by_side.py --markdown" in recipe
    assert ".benchmarks/venv/.ready" in recipe
