"""Tiny random checkpoints as transformers writes them, and the same as GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from torch import Tensor

from lockstep.kernels.attention import BLOCK
from lockstep.models.attention import KVCache, PackedAttention, PagedAttention
from lockstep.models.llama import Llama
from lockstep.text.gguf_tokenizer import TokenType, tokenizer_files
from lockstep.text.token_bytes import byte_to_char
from lockstep.text.tokenizer import Tokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB_SIZE = 320  # more than the tokenizer's 259, as padded embeddings have
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 64}),
    "linear-rope": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "yarn-rope": ("Llama", {"rope_parameters": YARN_ROPE}),
    "mistral": ("Mistral", {"sliding_window": 50}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


@pytest.fixture(scope="session")
def tokenizer_metadata() -> dict[str, Any]:
    """Bytes and three special tokens: every text can be written, nothing is merged but `th`."""
    tokens = [*SPECIALS, *byte_to_char().values(), "th"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(TokenType.CONTROL)] * 3 + [int(TokenType.NORMAL)] * 257,
        "tokenizer.ggml.merges": ["t h"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}",
    }


@pytest.fixture(scope="session")
def tokenizer(tokenizer_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(tokenizer_files(tokenizer_metadata))


@pytest.fixture(scope="session")
def hf_model() -> Callable[[str], Any]:
    """Make transformers' model of a family, with every parameter random, biases and norms too."""
    import transformers

    def build(family: str, **changes: Any) -> Any:
        prefix, options = FAMILIES[family]
        config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **options, **changes})
        torch.manual_seed(7)
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        return model

    return build


@pytest.fixture(scope="session")
def hf_folder(
    hf_model: Callable[[str], Any], tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Have transformers save a family's model; our tokenizer beside it. Read-only, shared."""
    made: dict[str, Path] = {}

    def save(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            hf_model(family).save_pretrained(folder)
            tokenizer.save(folder)
            made[family] = folder
        return made[family]

    return save


@pytest.fixture(scope="session")
def logits_of() -> Callable[[Llama, list[int]], Tensor]:
    def forward(model: Llama, token_ids: list[int]) -> Tensor:
        tokens_T = torch.tensor(token_ids)
        attention = PackedAttention.from_lengths([len(token_ids)])
        with torch.no_grad():
            return model.logits(model(tokens_T, torch.arange(len(token_ids)), attention))

    return forward


@pytest.fixture(scope="session")
def greedy_tokens() -> Callable[[Llama, list[int], int], list[int]]:
    """Greedy decoding over pages: the prompt as one chunk, then token by token."""

    @torch.no_grad()
    def decode(model: Llama, prompt: list[int], num_tokens: int) -> list[int]:
        num_blocks = -(-(len(prompt) + num_tokens) // BLOCK)
        cache = KVCache(model.config, num_blocks, model.compute_dtype)
        tokens, done = list(prompt), 0
        while len(tokens) < len(prompt) + num_tokens:
            chunk = tokens[done:]
            attention = PagedAttention(
                cache,
                block_tables_SB=torch.arange(num_blocks)[None],
                query_starts_S1=torch.tensor([0, len(chunk)]),
                context_lens_S=torch.tensor([done]),
                max_length=len(tokens),
            )
            hidden = model(torch.tensor(chunk), torch.arange(done, len(tokens)), attention)
            done = len(tokens)
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
        return tokens[len(prompt) :]

    return decode


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def pairs_from_halves(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k, index by index."""
    half = len(rows) // num_heads // 2
    order = [
        h * 2 * half + j * half + i for h in range(num_heads) for i in range(half) for j in (0, 1)
    ]
    return rows[order]


@pytest.fixture(scope="session")
def write_gguf(tokenizer_metadata: dict[str, Any]) -> Callable[..., Path]:
    """Write transformers' model as llama.cpp's converter does; matrices in the type asked for."""

    def write(
        model: Any, path: Path, *, arch: str, kind: str = "F32", rope_divisors: Any = None
    ) -> Path:
        config = model.config
        writer = GGUFWriter(path, arch)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        if head_dim := getattr(config, "head_dim", None):
            writer.add_key_length(head_dim)
            writer.add_value_length(head_dim)
        add_metadata(writer, tokenizer_metadata)
        if rope_divisors is not None:
            writer.add_tensor("rope_freqs.weight", np.asarray(rope_divisors, np.float32))
        tied = config.tie_word_embeddings
        for name, tensor in model.state_dict().items():
            if tied and name == "lm_head.weight":
                continue
            values = tensor.numpy()
            if arch == "llama" and ".q_proj." in name:
                values = pairs_from_halves(values, config.num_attention_heads)
            if arch == "llama" and ".k_proj." in name:
                values = pairs_from_halves(values, config.num_key_value_heads)
            quantised = GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
            data = quants.quantize(values, quantised)
            writer.add_tensor(gguf_name(name), data, raw_dtype=quantised)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def add_metadata(writer: GGUFWriter, metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_string(key, value)


def gguf_name(name: str) -> str:
    module, _, leaf = name.rpartition(".")
    if module in GGUF_NAMES:
        return f"{GGUF_NAMES[module]}.{leaf}"
    layer, _, rest = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{leaf}"
