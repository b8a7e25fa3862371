"""What is written is what was rounded: compressed-tensors and GGUF, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from lockstep.compress.compressed_tensors import pack_nibbles, quantization_config, tensors_of
from lockstep.compress.gguf_blocks import gguf_type, to_blocks
from lockstep.compress.methods import quantize_nearest
from lockstep.core.errors import ConfigError
from lockstep.core.quantization import parse_scheme
from lockstep.text.gguf_metadata import tokenizer_metadata
from lockstep.text.gguf_tokenizer import tokenizer_files
from lockstep.text.tokenizer import Tokenizer


def weight(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))


def unpack_nibbles(words: Tensor, columns: int) -> Tensor:
    nibbles = words[..., None] >> torch.arange(0, 32, 4) & 15
    return nibbles.flatten(1)[:, :columns]


def test_packed_nibbles_come_back() -> None:
    codes = torch.randint(0, 16, (5, 19), generator=torch.Generator().manual_seed(0))
    words = pack_nibbles(codes)
    assert words.dtype == torch.int32
    assert words.shape == (5, 3)
    assert torch.equal(unpack_nibbles(words, 19), codes)


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-asym", "int4-g64-asym"])
def test_int4_tensors_hold_the_weight(name: str) -> None:
    quantized = quantize_nearest(weight(12, 96), parse_scheme(name))
    tensors = tensors_of("a.weight", quantized)
    assert tensors["a.weight_shape"].tolist() == [12, 96]
    codes = unpack_nibbles(tensors["a.weight_packed"], 96).float()
    size = parse_scheme(name).group_size
    assert size is not None
    zero: Tensor | float = 8.0
    if "a.weight_zero_point" in tensors:
        packed = tensors["a.weight_zero_point"]
        assert packed.shape == (2, -(-96 // size))
        zero = unpack_nibbles(packed.t(), 12).t().float().repeat_interleave(size, 1)[:, :96]
    scales = tensors["a.weight_scale"].float().repeat_interleave(size, 1)[:, :96]
    assert torch.equal((codes - zero) * scales, quantized.dequantize())


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_channel_tensors_hold_the_weight(name: str) -> None:
    quantized = quantize_nearest(weight(12, 100), parse_scheme(name))
    tensors = tensors_of("a.weight", quantized)
    values = tensors["a.weight"].float() * tensors["a.weight_scale"].float()
    assert torch.equal(values, quantized.dequantize())


def test_the_config_names_the_layout() -> None:
    assert quantization_config(parse_scheme("int8"))["format"] == "int-quantized"
    group = quantization_config(parse_scheme("int4-g64-asym"))["config_groups"]["group_0"]
    assert group["weights"]["group_size"] == 64
    assert not group["weights"]["symmetric"]


@pytest.mark.parametrize(
    ("name", "exact"),
    [("q8_0", True), ("q4_0", True), ("q4_1", True), ("int8", True), ("int4-g32", True),
     ("int4-g32-asym", False)],
)  # fmt: skip
def test_blocks_are_read_back_by_the_gguf_library(name: str, exact: bool) -> None:
    quantized = quantize_nearest(weight(6, 64), parse_scheme(name))
    raw = to_blocks(quantized)
    got = dequantize(raw, GGMLQuantizationType[gguf_type(quantized.scheme)])
    # Q4_1's minimum has one bit less than the product scale * zero point may need.
    tolerance = 0.0 if exact else 2e-3
    np.testing.assert_allclose(got, quantized.dequantize().numpy(), rtol=0, atol=tolerance)


def test_blocks_need_rows_of_whole_blocks() -> None:
    with pytest.raises(ConfigError, match="does not divide 40"):
        to_blocks(quantize_nearest(weight(2, 40), parse_scheme("int8")))


def test_a_tokenizer_survives_gguf(tokenizer: Tokenizer) -> None:
    metadata = tokenizer_metadata(tokenizer, 320)
    assert metadata["tokenizer.ggml.pre"] == "smollm"
    assert len(metadata["tokenizer.ggml.tokens"]) == 320
    again = Tokenizer(tokenizer_files(metadata))
    for text in ("The things they thought.", "<|im_start|>12 Zürich\n", ""):
        assert again.encode(text) == tokenizer.encode(text)
    assert again.eos_token_id == tokenizer.eos_token_id


def test_the_folder_is_not_written_over(tmp_path: Path) -> None:
    from lockstep.compress.run import check_out

    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        check_out(tmp_path)
