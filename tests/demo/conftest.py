"""A toy road: a tiny random model, a task its adapter can learn from rewards, two questions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.core.run_folder import Record
from lockstep.demo.config import DemoConfig
from lockstep.evaluate.single_turn import TaskConfig
from lockstep.models.lora_config import LoraConfig

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(
    tmp_path_factory: pytest.TempPathFactory,
    save_tiny_model: Callable[..., None],
    byte_pieces: list[str],
) -> Path:
    """A Hugging Face folder: two layers, every byte a token, random weights."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(
        folder,
        pieces=byte_pieces,
        specials=SPECIAL,
        begin=SPECIAL[0],
        end=SPECIAL[2],
        chat_template=CHATML,
        max_position=512,
    )
    return folder


@pytest.fixture(scope="session")
def toy_demo(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> DemoConfig:
    """`say DIGIT` is answered by a digit: SFT teaches digits, RL teaches that it is always 7."""
    folder = tmp_path_factory.mktemp("toy")
    questions = [f"say {number}" for number in range(60)]
    _write(
        folder / "sft.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": str(number % 10)},
                ]
            }
            for number, question in enumerate(questions)
        ],
    )
    items = [{"prompt": question, "answer": "7"} for question in questions]
    _write(folder / "train.jsonl", items[:30])
    _write(folder / "held_out.jsonl", items[30:])
    _write(
        folder / "choices.jsonl",
        [{"question": "one?", "choices": ["1", "b"], "answer": "1"} for _ in range(4)],
    )
    return DemoConfig(
        model=str(tiny_model),
        precision="fp32",
        task=f"free_answer:{folder / 'train.jsonl'}",
        held_out_task=f"free_answer:{folder / 'held_out.jsonl'}",
        posing=TaskConfig(extract="number"),
        num_items=30,
        measured_tokens=1,
        choices=folder / "choices.jsonl",
        sft_data=folder / "sft.jsonl",
        sft_epochs=4,
        sft_learning_rate=1e-2,
        sft_lora=LoraConfig(r=16, alpha=64),
        rl_steps=12,
        rl_prompts=8,
        rl_samples=8,
        rl_max_tokens=1,
        rl_learning_rate=1e-2,
        rl_eval_every=6,
        rl_eval_items=10,
        question="say 7",
        question_tokens=4,
        num_questions=6,
        answer_tokens=8,
    )


def _write(path: Path, records: list[Record]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
