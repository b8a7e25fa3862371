"""Two small tokenizers with the vocabularies' real structure, described as GGUF metadata."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lockstep.text.gguf_tokenizer import TokenType, tokenizer_files
from lockstep.text.token_bytes import SPACE_MARK
from lockstep.text.tokenizer import Tokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog, doesn't it? In 2024 or 1999.",
    "Die Straße führt nach Köln; 北京 и Москва, naïve café, 🙂🎉 and the rest.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 22))  # 333",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def trained() -> tokenizers.Tokenizer:
    """A byte-level BPE with digits apart, made by the tokenizers library alone."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(TEXT, trainer)
    return library


@pytest.fixture(scope="session")
def byte_level_metadata(trained: tokenizers.Tokenizer) -> dict[str, Any]:
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            TokenType.CONTROL if token in SPECIALS else TokenType.NORMAL for token in tokens
        ],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.fixture(scope="session")
def sentencepiece_metadata() -> dict[str, Any]:
    """Llama 2's layout: unknown, bos, eos, 256 bytes, then pieces, the better the earlier."""
    pieces = ["he", "ll", "hell", "hello", "wo", "rl", "worl", "world", "o", "an", "and"]
    pieces = [*(SPACE_MARK + piece for piece in pieces), *pieces, SPACE_MARK * 2, SPACE_MARK]
    letters = sorted(set("abcdefghijklmnopqrstuvwxyzé北") - set(pieces))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    num_fixed = len(tokens)
    tokens += [*pieces, *letters]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [
            0.0 if i < num_fixed else -float(i - num_fixed) for i in range(len(tokens))
        ],
        "tokenizer.ggml.token_type": [
            TokenType.UNKNOWN,
            TokenType.CONTROL,
            TokenType.CONTROL,
            *[TokenType.BYTE] * 256,
            *[TokenType.NORMAL] * (len(tokens) - num_fixed),
        ],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


@pytest.fixture(scope="session")
def byte_level(byte_level_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizer_files(byte_level_metadata))


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizer_files(sentencepiece_metadata))


@pytest.fixture(scope="session", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)
