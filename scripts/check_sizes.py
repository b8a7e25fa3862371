"""Fail on source files that have grown past 500 lines: nobody reads those cold (STYLE.md, rule 21).

An exception needs a reason, in EXEMPT; an exemption that is no longer needed fails too.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAX_LINES = 500
SUFFIXES = {".py", ".cpp", ".h", ".cu", ".sh"}
EXEMPT: dict[str, str] = {}


def main() -> int:
    root = Path(__file__).parent.parent
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    problems = []
    for name in filter(None, listed.stdout.split("\0")):
        path = root / name
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        num_lines = path.read_bytes().count(b"\n")
        if num_lines > MAX_LINES and name not in EXEMPT:
            problems.append(f"{name}: {num_lines} lines, at most {MAX_LINES}; split it by purpose")
        if num_lines <= MAX_LINES and name in EXEMPT:
            problems.append(f"{name}: {num_lines} lines, no longer needs its entry in EXEMPT")
    print("\n".join(problems) or f"File sizes: all within {MAX_LINES} lines")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
