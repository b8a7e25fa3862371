"""Write the tour of the code in docs/architecture.md from what the files say of themselves.

One line a file: the first sentence of its docstring, or of the comment atop a C++ file. `--check`
changes nothing and fails when the page is out of date, so the map stays true without anybody having
to remember it.
"""

from __future__ import annotations

import ast
import re
import sys
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = ROOT / "src" / "lockstep"
START, END = "<!-- tour: written by scripts/write_tour.py -->", "<!-- end of tour -->"
SENTENCE_END = re.compile(r"(?<!et al)\. ")
LAYERS = ("core", "text", "schedule", "kernels", "parallel", "models", "engine", "train")
LAYERS += ("compress", "evaluate", "plan", "profile", "rl", "serve", "demo", "cli")


def main() -> int:
    page = PAGE.read_text()
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    updated = f"{before}{START}\n{tour()}\n{END}{after}"
    if updated == page:
        print(f"Tour: {PAGE.relative_to(ROOT)} is up to date")
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE.relative_to(ROOT)} is out of date; run `make docs`")
        return 1
    PAGE.write_text(updated)
    print(f"Tour: {PAGE.relative_to(ROOT)} rewritten")
    return 0


def tour() -> str:
    """The Markdown between the markers."""
    sections = []
    for layer in LAYERS:
        folder = PACKAGE / layer
        if not (folder / "__init__.py").is_file():
            continue
        lines = [f"### {layer}", "", first_sentence(folder / "__init__.py"), ""]
        for path in sorted(folder.rglob("*.py")):
            if path != folder / "__init__.py":
                lines.append(f"- `{module_name(path, folder)}`: {first_sentence(path)}")
        for path in sorted([*folder.rglob("*.cpp"), *folder.rglob("*.h")]):
            lines.append(f"- `{path.relative_to(folder)}`: {first_sentence(path)}")
        sections.append("\n".join(lines))
    return "\n" + "\n\n".join(sections) + "\n"


def module_name(path: Path, folder: Path) -> str:
    """`linear` for linear/__init__.py, `linear.cpu` for linear/cpu.py."""
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def first_sentence(path: Path) -> str:
    """The first sentence of what a file says of itself, on one line."""
    text = path.read_text()
    if path.suffix == ".py":
        comment = ast.get_docstring(ast.parse(text)) or ""
    else:
        lines = takewhile(lambda line: line.startswith("//"), text.splitlines())
        comment = "\n".join(line.removeprefix("//").strip() for line in lines)
    if not comment:
        raise SystemExit(
            f"{path.relative_to(ROOT)} does not say what it is for; begin it with that"
        )
    paragraph = " ".join(comment.split("\n\n")[0].split())
    return SENTENCE_END.split(paragraph)[0].rstrip(".:") + "."


if __name__ == "__main__":
    sys.exit(main())
