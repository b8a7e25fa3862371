"""Folding scales leaves the function as it is; the searches never make a layer worse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.compress.folds import fold, foldable_scale
from lockstep.compress.layer_stream import HiddenStates, LayerRunner, projection, read_layer
from lockstep.compress.methods import quantize_layer
from lockstep.compress.rounded import round_layer
from lockstep.compress.statistics import READERS, collect
from lockstep.core.quantization import parse_scheme
from lockstep.models.hf_folder import HfFolder

LENGTH = 32


@pytest.fixture
def states(tmp_path: Path) -> HiddenStates:
    made = HiddenStates(tmp_path / "states", (4, LENGTH, 64), torch.float32)
    made.x_SLD.copy_(torch.randn(4, LENGTH, 64, generator=torch.Generator().manual_seed(0)))
    made.x_SLD[..., 5] *= 20
    return made


@pytest.mark.parametrize("reader", READERS)
def test_folds_preserve_the_function(tiny_model: Path, states: HiddenStates, reader: str) -> None:
    checkpoint = HfFolder(tiny_model)
    runner, layer = LayerRunner(checkpoint.config, LENGTH), read_layer(checkpoint, 0)
    before = torch.stack([y for _, y in runner.outputs(layer, states)])
    inputs = projection(layer, reader).weight.shape[1]
    wanted = torch.rand(inputs, generator=torch.Generator().manual_seed(2)) * 3 + 0.2
    scale = foldable_scale(layer, reader, wanted, stored=torch.bfloat16)
    fold(layer, reader, scale)
    after = torch.stack([y for _, y in runner.outputs(layer, states)])
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    if reader in ("self_attn.q_proj", "mlp.gate_proj"):
        norm = "input_layernorm" if "attn" in reader else "post_attention_layernorm"
        weight = layer.get_submodule(norm).weight
        torch.testing.assert_close(weight, weight.bfloat16().float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("scheme", "method"), [("int4-g32-asym", "awq"), ("int8", "smoothquant"), ("fp8", "gptq")]
)
def test_methods_err_less_than_rounding_to_nearest(
    tiny_model: Path, states: HiddenStates, scheme: str, method: str
) -> None:
    checkpoint = HfFolder(tiny_model)
    runner = LayerRunner(checkpoint.config, LENGTH)
    stats = collect(runner, read_layer(checkpoint, 0), states)
    assert stats["mlp.down_proj"].num_tokens == 4 * LENGTH

    original = torch.stack([y for _, y in runner.outputs(read_layer(checkpoint, 0), states)])

    def output_error(by: str) -> float:
        layer = read_layer(checkpoint, 0)
        rounded = quantize_layer(
            layer,
            stats,
            scheme=parse_scheme(scheme),
            method=by,  # type: ignore[arg-type]
            damping=0.01,
        )
        round_layer(layer, {name: r.weight for name, r in rounded.items()})
        got = torch.stack([y for _, y in runner.outputs(layer, states)])
        return float((got - original).norm())

    assert output_error(method) < output_error("rtn")
