"""A toy road: a tiny random model, a task its adapter can learn from rewards, two questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from lockstep.core.model_config import ModelConfig
from lockstep.core.run_folder import Record
from lockstep.demo.config import DemoConfig
from lockstep.evaluate.single_turn import TaskConfig
from lockstep.models.export import save_hf_folder
from lockstep.models.llama import Llama
from lockstep.models.lora_config import LoraConfig
from lockstep.text.tokenizer import Tokenizer, TokenizerFiles

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: two layers, every byte a token, random weights."""
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    library = Library(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer = Tokenizer(
        TokenizerFiles(
            tokenizer_json=library.to_str(),
            config={"bos_token": SPECIAL[0], "eos_token": SPECIAL[2]},
            chat_template=CHATML,
        )
    )
    model = Llama(
        ModelConfig(
            vocab_size=len(pieces),
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            max_position=512,
            tie_embeddings=True,
            eos_token_ids=(2,),
            initializer_range=0.1,
        )
    )
    model.initialise(seed=0)
    folder = tmp_path_factory.mktemp("tiny")
    save_hf_folder(model, folder, tokenizer=tokenizer, dtype="float32", quiet=True)
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
