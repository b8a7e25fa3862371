"""A byte-level tokenizer with three merges, the chat templates of the wild, a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from lockstep.core.model_config import ModelConfig
from lockstep.models.export import save_hf_folder
from lockstep.models.llama import Llama
from lockstep.text.tokenizer import Tokenizer, TokenizerFiles
from lockstep.train.packing import Document

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "marked": CHATML_MARKED,
    "marked without end": CHATML_MARKED.replace(
        "<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"
    ),
    "trimmed": CHATML.replace("m.content", "m.content | trim"),
    "llama 2": (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    ),
    "forgets thoughts": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "never ends": CHATML.replace("<|im_end|>", "###"),
    "other prompt": CHATML.replace("assistant\n{% endif %}", "model\n{% endif %}"),
    "shouts": CHATML.replace("m.content", "m.content | upper"),
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _tokenizer(template: str = "chatml") -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = "\u010a"  # how byte-level vocabularies write "\n"
    merges = [(newline, newline), ("h", "e"), ("l", "l")]
    pieces = [*SPECIAL, *alphabet, *("".join(pair) for pair in merges)]
    library = Library(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    config = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    return Tokenizer(
        TokenizerFiles(
            tokenizer_json=library.to_str(), config=config, chat_template=TEMPLATES[template]
        )
    )


def _config(**changes: object) -> ModelConfig:
    shape = {
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "max_position": 512,
        "tie_embeddings": True,
        "bos_token_id": 0,
        "eos_token_ids": (2,),
        "initializer_range": 0.1,
    }
    return ModelConfig(**{**shape, **changes})


def _model(*, compute_dtype: torch.dtype = torch.float32, **changes: object) -> Llama:
    model = Llama(_config(**changes), compute_dtype=compute_dtype)
    model.initialise(seed=0)
    return model


def _documents(lengths: list[int], *, seed: int = 0) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Document(
            token_ids=torch.randint(3, 272, (length,), generator=generator).tolist(),
            loss_weights=(torch.rand(length, generator=generator) < 0.7).float().tolist(),
        )
        for length in lengths
    ]


@pytest.fixture
def make_tokenizer() -> Callable[..., Tokenizer]:
    """make_tokenizer(template="chatml"): a template's name in TEMPLATES."""
    return _tokenizer


@pytest.fixture
def make_model() -> Callable[..., Llama]:
    """make_model(compute_dtype=torch.float32, **changes to the config)."""
    return _model


@pytest.fixture
def make_documents() -> Callable[..., list[Document]]:
    """make_documents(lengths, seed=0): random tokens, 70% of them with loss."""
    return _documents


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tiny model as a Hugging Face folder."""
    folder = tmp_path / "tiny"
    save_hf_folder(_model(), folder, tokenizer=_tokenizer(), dtype="float32", quiet=True)
    return folder


@pytest.fixture
def data_file(tmp_path: Path) -> Path:
    """Twelve short conversations that can be learned by heart."""
    path = tmp_path / "train.jsonl"
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"say {number}"},
                    {"role": "assistant", "content": f"{number} it is" + "!" * (number % 3)},
                ]
            }
        )
        for number in range(12)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path
