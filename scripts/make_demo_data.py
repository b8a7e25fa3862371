"""Writes the demo's SFT set: arithmetic questions of reasoning-gym's `chain_sum` with their bare answers.

Run once; the result is bundled as src/lockstep/demo/arithmetic_sft.jsonl. The questions come from
their own block of generator seeds, so neither RL nor the held-out measurement draws from it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lockstep.core.files import write_text
from lockstep.evaluate.reasoning_gym_source import MAX_SEED, ReasoningGymSource

TASK = "chain_sum:min_terms=2,max_terms=3,min_digits=1,max_digits=2"


def main(path: Path, count: int) -> None:
    source = ReasoningGymSource(TASK)
    lines = []
    for index in range(count):
        item = source.item(index, split="train", seed=MAX_SEED)
        messages = [
            {"role": "user", "content": item.prompt},
            {"role": "assistant", "content": item.answer},
        ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    write_text(path, "".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
