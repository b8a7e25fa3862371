"""A tiny model with a byte-level tokenizer, text for it, and inputs as correlated as real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lockstep.compress.statistics import InputStatistics
from lockstep.core.model_config import ModelConfig
from lockstep.models.export import save_hf_folder
from lockstep.models.llama import Llama
from lockstep.text.gguf_tokenizer import TokenType, tokenizer_files
from lockstep.text.token_bytes import byte_to_char
from lockstep.text.tokenizer import Tokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(
        tokenizer_files(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "smollm",
                "tokenizer.ggml.tokens": [*SPECIALS, *byte_to_char().values(), "th"],
                "tokenizer.ggml.token_type": [int(TokenType.CONTROL)] * 3
                + [int(TokenType.NORMAL)] * 257,
                "tokenizer.ggml.merges": ["t h"],
                "tokenizer.ggml.bos_token_id": 1,
                "tokenizer.ggml.eos_token_id": 2,
                "tokenizer.ggml.add_bos_token": False,
            }
        )
    )


@pytest.fixture(scope="session")
def tiny_model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, grouped K/V heads, biases on q, k and v; a Hugging Face folder. Read-only."""
    model = Llama(
        ModelConfig(
            architecture="Qwen2ForCausalLM",
            vocab_size=320,
            hidden_size=64,
            intermediate_size=96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            max_position=128,
            tie_embeddings=True,
            qkv_bias=True,
            eos_token_ids=(2,),
            initializer_range=0.1,
        )
    )
    model.initialise(seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter) * 0.5)
                assert "norm" in name or "bias" in name
    folder = tmp_path_factory.mktemp("tiny")
    save_hf_folder(model, folder, tokenizer=tokenizer, dtype="float32", quiet=True)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    sentences = [f"The {n}th of the things that {n * 7 % 13} of them thought." for n in range(200)]
    path.write_text("".join(json.dumps({"text": s}) + "\n" for s in sentences))
    return path


@pytest.fixture(scope="session")
def correlated_inputs() -> Callable[[int], InputStatistics]:
    """Statistics of inputs that vary along few directions, one of them large."""

    def make(num_inputs: int) -> InputStatistics:
        generator = torch.Generator().manual_seed(1)
        mixing = torch.randn(num_inputs // 4, num_inputs, generator=generator)
        x_TK = torch.randn(512, num_inputs // 4, generator=generator) @ mixing
        x_TK += 0.1 * torch.randn(512, num_inputs, generator=generator)
        x_TK[:, 3] *= 30
        return InputStatistics(
            hessian_KK=x_TK.t() @ x_TK,
            largest_K=x_TK.abs().amax(0),
            mean_K=x_TK.abs().mean(0),
            rows_TK=x_TK,
            num_tokens=len(x_TK),
        )

    return make
