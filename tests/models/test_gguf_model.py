"""A GGUF file must give the model it was written from: config, row order, rope, tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants

from lockstep.core.errors import CheckpointError
from lockstep.models.gguf_model import GgufModel
from lockstep.models.hf_folder import HfFolder
from lockstep.models.loading import load_model
from lockstep.text.tokenizer import Tokenizer

ARCH_OF = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "llama3-rope": "llama"}
PROMPT = [5, 40, 41, 260, 7, 99, 150, 33] * 12

Build = Callable[..., Any]
Write = Callable[..., Path]


def llama3_divisors(config: Any) -> list[float]:
    """As llama.cpp's converter writes them, from the formula of Llama 3.1."""
    rope = config.rope_parameters
    factor, original = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / config.head_dim)
        smooth = (original / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        is_short, is_long = wavelength < original / high, wavelength > original / low
        divisors.append(1.0 if is_short else factor if is_long else between)
    return divisors


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "llama3-rope"])
def test_float32_file_gives_the_same_bits_as_the_folder(
    family: str,
    hf_model: Build,
    hf_folder: Callable[[str], Path],
    write_gguf: Write,
    logits_of: Callable[..., torch.Tensor],
    tmp_path: Path,
) -> None:
    model = hf_model(family)
    divisors = llama3_divisors(model.config) if family == "llama3-rope" else None
    path = write_gguf(model, tmp_path / "m.gguf", arch=ARCH_OF[family], rope_divisors=divisors)
    from_gguf = load_model(path, precision="fp32", quiet=True)
    from_folder = load_model(hf_folder(family), precision="fp32", quiet=True)
    theirs = dict(from_folder.model.named_parameters())
    for name, parameter in from_gguf.model.named_parameters():
        assert torch.equal(parameter, theirs[name]), name
    # GGUF does not say how weights were initialised.
    expected = dataclasses.replace(from_folder.config, initializer_range=0.02)
    assert from_gguf.config == expected
    assert torch.equal(logits_of(from_gguf.model, PROMPT), logits_of(from_folder.model, PROMPT))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_weights_are_permuted_after_dequantising(
    kind: str, hf_model: Build, write_gguf: Write, tmp_path: Path
) -> None:
    model = hf_model("llama")
    path = write_gguf(model, tmp_path / "m.gguf", arch="llama", kind=kind)
    loaded = load_model(path, precision="fp32", quiet=True).model
    for name, parameter in loaded.named_parameters():
        original = model.state_dict()[name].numpy()
        expected = original
        if original.ndim == 2:
            quantised = GGMLQuantizationType[kind]
            expected = quants.dequantize(quants.quantize(original, quantised), quantised)
        np.testing.assert_array_equal(parameter.detach().numpy(), expected, err_msg=name)


def test_tokenizer_of_the_file(
    hf_model: Build, write_gguf: Write, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    loaded = load_model(
        write_gguf(hf_model("qwen2"), tmp_path / "m.gguf", arch="qwen2"), quiet=True
    )
    text = "the naïve <|im_end|> 42"
    assert loaded.tokenizer.encode(text) == tokenizer.encode(text)
    assert loaded.config.eos_token_ids == (2,)
    assert loaded.tokenizer.chat_template is not None


def write_header(path: Path, changes: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    writer = GGUFWriter(path, changes.pop("general.architecture", "llama"))
    values: dict[str, Any] = {
        "block_count": 1,
        "context_length": 4096,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "rope.freq_base": 10_000.0,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in {**values, **changes}.items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{writer.arch}.{key}", value)
    for name, tensor in {"token_embd.weight": np.zeros((8, 64), np.float32), **tensors}.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def config_of(tmp_path: Path, changes: dict[str, Any], **tensors: np.ndarray) -> Any:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    return GgufModel(write_header(tmp_path / "h.gguf", changes, named)).config


def test_rope_scaling_of_the_metadata(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    rope = config_of(tmp_path, linear).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    rope = config_of(tmp_path, {**yarn, "rope.scaling.original_context_length": 1024}).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 1024)
    assert rope.attention_factor is None


def test_epsilon_and_base_are_the_decimals_that_were_meant(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"rope.freq_base": 100_000.0})
    assert (config.rms_norm_eps, config.rope.theta) == (1e-5, 100_000.0)


def test_a_window_in_a_llama_file_means_mistral(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"attention.sliding_window": 128})
    assert (config.architecture, config.sliding_window) == ("MistralForCausalLM", 128)


def test_llama3_parameters_are_found_whatever_they_are(tmp_path: Path) -> None:
    for original, high, factor in ((8192, 4.0, 8.0), (8192, 4.0, 32.0), (4096, 3.0, 16.0)):
        wavelengths = 2 * np.pi * 500_000.0 ** (np.arange(0, 128, 2) / 128)
        smooth = ((original / wavelengths - 1) / (high - 1)).clip(0, 1)
        divisors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
        changes = {"rope.freq_base": 500_000.0, "attention.key_length": 128}
        rope = config_of(tmp_path, changes, rope_freqs__weight=divisors).rope
        assert (rope.kind, rope.factor, rope.original_max_position) == ("llama3", factor, original)
        assert rope.high_freq_factor == high


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"general.architecture": "gemma3"}, {}, "'gemma3'; supported are llama, qwen2, qwen3"),
        ({"rope.scaling.type": "longrope"}, {}, "'longrope' is not supported"),
        ({"expert_count": 8}, {}, "mixture-of-experts"),
        ({"rope.dimension_count": 8}, {}, "rope.dimension_count 8 is not supported"),
        ({"attention.value_length": 8}, {}, "must equal the head dimension 16"),
        ({"attention.head_count_kv": 3}, {}, "3 key/value heads do not divide 4"),
        (
            {},
            {"rope_freqs__weight": np.linspace(1, 8, 8, dtype=np.float32)},
            "is not Llama 3's rope scaling",
        ),
        ({}, {"rope_freqs__weight": np.ones(5, np.float32)}, "must hold 8 divisors"),
        ({}, {"blk__0__attn_q__bias": np.ones(64, np.float32)}, "biases on only some"),
    ],
)
def test_what_is_not_supported_is_named(
    changes: dict[str, Any], tensors: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_of(tmp_path, dict(changes), **tensors)


def test_converting_to_a_folder_keeps_every_bit(
    hf_model: Build, write_gguf: Write, tmp_path: Path
) -> None:
    from lockstep.models.export import save_checkpoint

    path = write_gguf(hf_model("llama"), tmp_path / "m.gguf", arch="llama", kind="Q4_1")
    gguf = GgufModel(path)
    save_checkpoint(gguf, tmp_path / "folder", dtype="float32", quiet=True)
    folder = HfFolder(tmp_path / "folder")
    assert folder.shapes == gguf.shapes
    assert all(torch.equal(folder.read(name), gguf.read(name)) for name in gguf.shapes)
    assert dataclasses.asdict(folder.config) == dataclasses.asdict(gguf.config)
