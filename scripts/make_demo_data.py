"""Write the demo's SFT set: questions of its RL task with their bare answers.

    python scripts/make_demo_data.py

The result is bundled as src/lockstep/demo/sft.jsonl. The questions come from a block of generator
seeds that RL does not draw from, and none reads like a question the demo is measured on.
"""

from __future__ import annotations

import json

from lockstep.core.files import write_text
from lockstep.demo.config import DemoConfig
from lockstep.evaluate.reasoning_gym_source import MAX_SEED
from lockstep.evaluate.tasks import load_environment


def sft_lines(config: DemoConfig) -> list[str]:
    """`sft_examples` conversations, none of them posed in a measurement."""
    environment = load_environment(config.task, config.posing)
    taken = {
        str(environment.item(index, split="held_out").prompt) for index in range(config.num_items)
    }
    lines: list[str] = []
    index = 0
    while len(lines) < config.sft_examples:
        item = environment.item(index, split="train", seed=MAX_SEED)
        index += 1
        if str(item.prompt) in taken:
            continue
        taken.add(str(item.prompt))
        messages = [*item.prompt, {"role": "assistant", "content": item.answer}]
        lines.append(json.dumps({"messages": messages}) + "\n")
    return lines


if __name__ == "__main__":
    config = DemoConfig()
    write_text(config.sft_data, "".join(sft_lines(config)))
    print(f"{config.sft_data}: {config.sft_examples} conversations")
