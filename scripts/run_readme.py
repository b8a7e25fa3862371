"""Run the ```bash blocks of README.md in order, as a newcomer would, and stop at the first failure.

A block is one script, run in the repository's root; what it left in the background is ended with
it. Blocks in other languages (```python, ```text) are shown, not run. Arguments are one-line blocks
to leave out, for a caller that has just run them: `run_readme.py "make test"`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAX_BLOCK_S = 30 * 60


def main() -> int:
    found = BLOCK.findall((ROOT / "README.md").read_text())
    blocks = [block for block in found if block.strip() not in sys.argv[1:]]
    for number, script in enumerate(blocks, start=1):
        print(f"-- README.md, block {number} of {len(blocks)}:\n{script}", flush=True)
        code = run(script)
        if code != 0:
            print(f"README.md, block {number} failed with exit code {code}")
            return 1
    print(f"README.md: {len(blocks)} blocks ran")
    return 0


def run(script: str) -> int:
    """Run one block in a process group of its own and return its exit code."""
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, start_new_session=True
    )
    try:
        return process.wait(timeout=MAX_BLOCK_S)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
