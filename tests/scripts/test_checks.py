from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Loader = Callable[[str], ModuleType]


def test_dead_links_are_found_and_live_ones_pass(load_script: Loader, tmp_path: Path) -> None:
    script = load_script("check_links")
    (tmp_path / "other.md").write_text("# A title, with `code`\n\n## Part 2\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-title-with-code) [c](#here) [d](https://x.org/y) "
        "`[no](link.md)`\n\n## Here\n\n```text\n[no](link.md)\n```\n"
        "[e](gone.md) [f](other.md#part-3)\n"
    )
    assert list(script.dead_links(page, tmp_path)) == [
        "page.md: gone.md does not exist",
        "page.md: other.md#part-3 names no heading of other.md",
    ]


def test_the_tour_takes_the_first_sentence(load_script: Loader, tmp_path: Path) -> None:
    script = load_script("write_tour")
    script.ROOT = tmp_path
    module = tmp_path / "m.py"
    module.write_text('"""What it is,\nin two lines. And more.\n\nNot this.\n"""\n')
    assert script.first_sentence(module) == "What it is, in two lines."
    module.write_text('"""y = x (Zhang et al. 2019). More."""\n')
    assert script.first_sentence(module) == "y = x (Zhang et al. 2019)."
    source = tmp_path / "m.cpp"
    source.write_text("// Threads that\n// spin.\n//\n// Not this.\n#include <x>\n// Nor this.\n")
    assert script.first_sentence(source) == "Threads that spin."
    module.write_text("x = 1\n")
    with pytest.raises(SystemExit, match=r"m\.py does not say what it is for"):
        script.first_sentence(module)


def test_a_readme_block_stops_at_its_first_failure(load_script: Loader, tmp_path: Path) -> None:
    script = load_script("run_readme")
    marker = tmp_path / "marker"
    assert script.run("true") == 0
    assert script.run(f"false; touch {marker}") != 0
    assert script.run(f"false | true; touch {marker}") != 0
    assert not marker.exists()


def test_only_bash_blocks_are_run(load_script: Loader) -> None:
    page = "```bash\none\ntwo\n```\n\n```text\nno\n```\n```python\nno\n```\n```bash\nthree\n```\n"
    assert load_script("run_readme").BLOCK.findall(page) == ["one\ntwo\n", "three\n"]


@pytest.mark.skipif(not shutil.which("g++") or not shutil.which("nm"), reason="needs g++ and nm")
def test_a_template_shared_by_two_simd_variants_is_found(
    load_script: Loader, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("check_native_symbols")
    script.BUILD = tmp_path
    source = tmp_path / "op.cpp"
    for body, code in (("static inline int f() { return 1; }", 0), ("inline int f();", 1)):
        tail = "inline int f() { return 2; }" if code else ""
        source.write_text(f"{body}\nnamespace ISA {{ int g() {{ return f(); }} }}\n{tail}\n")
        for isa in ("avx2", "avx512"):
            folder = tmp_path / f"simd_{isa}.dir"
            folder.mkdir(exist_ok=True)
            command = ["g++", "-O0", f"-DISA={isa}", "-c", source, "-o", folder / "op.cpp.o"]
            subprocess.run(command, check=True)
        assert script.main() == code
    assert "f() is defined in simd_avx2, simd_avx512; make it static" in capsys.readouterr().out
