"""Fail on a relative link in a Markdown file that leads nowhere, and on an unknown #heading."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.MULTILINE | re.DOTALL)
EXTERNAL = re.compile(r"^(https?:|mailto:)")


def main() -> int:
    root = Path(__file__).parent.parent
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "*.md"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [root / name for name in filter(None, listed.stdout.split("\0"))]
    problems = [problem for file in files if file.is_file() for problem in dead_links(file, root)]
    print("\n".join(problems) or f"Links: all good in {len(files)} Markdown files")
    return 1 if problems else 0


def dead_links(file: Path, root: Path) -> Iterator[str]:
    """One line for each link of `file` that leads nowhere."""
    for match in LINK.finditer(CODE.sub("", file.read_text())):
        target, _, fragment = match.group(1).partition("#")
        if EXTERNAL.match(match.group(1)):
            continue
        destination = (file.parent / target).resolve() if target else file
        where = f"{file.relative_to(root)}: {match.group(1)}"
        if not destination.exists():
            yield f"{where} does not exist"
        elif fragment and destination.suffix == ".md" and fragment not in anchors(destination):
            yield f"{where} names no heading of {destination.name}"


def anchors(file: Path) -> set[str]:
    """The fragments GitHub gives to the headings of a Markdown file."""
    headings = HEADING.findall(re.sub(r"^```.*?^```", "", file.read_text(), flags=re.M | re.S))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


if __name__ == "__main__":
    sys.exit(main())
