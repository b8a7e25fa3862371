"""A tiny random model, a byte-level tokenizer, and engines on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from lockstep.core.files import write_json, write_text
from lockstep.core.model_config import ModelConfig
from lockstep.engine import Engine, EngineConfig
from lockstep.models import Llama
from lockstep.text.tokenizer import Tokenizer

EngineOf = Callable[..., Engine]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Every byte a token, then `<|endoftext|>`, `<|im_start|>`, `<|im_end|>`: 259 tokens."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    library.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    write_text(folder / "chat_template.jinja", CHATML)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> Llama:
    """Two layers; its distributions are neither flat nor peaked."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=256,
        tie_embeddings=True,
        eos_token_ids=(tokenizer.vocab_size - 1,),
        initializer_range=0.4,
    )
    model = Llama(config, compute_dtype=torch.float32)
    model.initialise(seed=3)
    return model


@pytest.fixture
def engine_of(model: Llama, tokenizer: Tokenizer) -> EngineOf:
    """An engine with a KV cache of 1,024 tokens, or as asked."""

    def build(*, with_tokenizer: bool = True, **config: object) -> Engine:
        settings = EngineConfig(**{"kv_cache_tokens": 1024, **config})
        return Engine(model, tokenizer if with_tokenizer else None, settings)

    return build


@pytest.fixture
def engine(engine_of: EngineOf) -> Engine:
    return engine_of()
