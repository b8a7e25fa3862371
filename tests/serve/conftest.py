"""A tiny random model with a real tokenizer and template, for tests that need a whole server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from lockstep.core.files import write_json, write_text

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 32, 2, 4, 2, 8, 64
MAX_POSITION = 256

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: 2 layers, every byte a token, a few merges, ChatML, random weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    vocab_size = write_tokenizer(folder)
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": HIDDEN,
            "intermediate_size": FEED_FORWARD,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": MAX_POSITION,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": vocab_size - 3,
            "eos_token_id": vocab_size - 1,
            "torch_dtype": "float32",
        },
    )
    write_json(folder / "generation_config.json", {"eos_token_id": vocab_size - 1})
    save_file(random_weights(vocab_size), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path) -> int:
    """Byte-level BPE; returns the vocabulary's size."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("a", "n"), ("Ġ", "a"), ("l", "l")]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    library = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges)
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    library.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
    )
    write_text(folder / "chat_template.jinja", CHATML)
    return library.get_vocab_size()


def random_weights(vocab_size: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)

    def matrix(rows: int, columns: int, scale: float = 0.2) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) * scale).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, HIDDEN, 0.5),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(HIDDEN, np.float32),
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": matrix(FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(FEED_FORWARD, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, FEED_FORWARD),
        }
    return weights
