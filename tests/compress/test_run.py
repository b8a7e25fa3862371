"""Whole compressions of a tiny model: formats, gate, report, and what stops one early."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lockstep.compress import run
from lockstep.compress.config import CalibrationConfig, Limits, QuantizeConfig, choose_scheme
from lockstep.compress.methods import RoundedWeight
from lockstep.compress.texts import load_texts
from lockstep.core.errors import CheckpointError, ConfigError, DataError
from lockstep.models.loading import open_checkpoint
from lockstep.models.resolve import resolve_model
from lockstep.text.tokenizer import Tokenizer


@pytest.fixture
def config(tiny_model: Path, text_file: Path, tmp_path: Path) -> QuantizeConfig:
    return QuantizeConfig(
        model=str(tiny_model),
        out=tmp_path / "out",
        scheme=choose_scheme("int8", group_size=None, symmetric=False),
        method="rtn",
        data=CalibrationConfig(
            calibration=str(text_file), num_sequences=4, sequence_length=32, held_out_sequences=4
        ),
        limits=Limits(max_perplexity_increase=0.1),
    )


def with_(config: QuantizeConfig, family: str, method: str, **changes: Any) -> QuantizeConfig:
    scheme = choose_scheme(family, group_size=None, symmetric=False)
    return dataclasses.replace(config, scheme=scheme, method=method, **changes)  # type: ignore[arg-type]


def test_both_formats_hold_the_same_weights(config: QuantizeConfig) -> None:
    config = with_(config, "int8", "smoothquant", format="both")
    outcome = run.quantize(config, quiet=True)
    assert outcome.passed, outcome.gate.failures
    assert len(outcome.gate.layers) == 2
    assert outcome.gate.num_tokens == 4 * 31
    stored = load_file(config.out / "model.safetensors")
    gguf = open_checkpoint(resolve_model(config.out / "model.gguf"))
    name = "model.layers.1.mlp.down_proj.weight"
    ours = stored[name].float() * stored[f"{name}_scale"].float()
    assert torch.equal(gguf.read(name), ours)
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(gguf.read(norm), stored[norm].float())
    report = json.loads((config.out / "quantization.json").read_text())
    assert report["passed"]
    assert report["config"]["method"] == "smoothquant"
    described = json.loads((config.out / "config.json").read_text())
    assert described["quantization_config"]["quant_method"] == "compressed-tensors"


@pytest.mark.parametrize(("family", "method"), [("int4", "gptq"), ("int4", "awq"), ("fp8", "rtn")])
def test_other_schemes_come_through(config: QuantizeConfig, family: str, method: str) -> None:
    outcome = run.quantize(with_(config, family, method), quiet=True)
    assert outcome.gate.kl_mean < 0.1
    assert all(0 < error < 0.3 for row in outcome.gate.layers for error in row.projections.values())


def test_gguf_alone_uses_its_own_types(config: QuantizeConfig) -> None:
    run.quantize(with_(config, "int4", "gptq", format="gguf"), quiet=True)
    assert sorted(path.name for path in config.out.iterdir()) == ["model.gguf", "quantization.json"]
    assert open_checkpoint(resolve_model(config.out / "model.gguf")).config.qkv_bias


def test_a_damaged_layer_fails_the_gate_and_is_kept(
    config: QuantizeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*arguments: Any, **options: Any) -> dict[str, RoundedWeight]:
        rounded = quantize_layer(*arguments, **options)
        for result in rounded.values():
            result.weight.values_NK.copy_(result.weight.values_NK.roll(1, 0))
        return rounded

    quantize_layer = run.quantize_layer
    monkeypatch.setattr(run, "quantize_layer", damaged)
    outcome = run.quantize(
        dataclasses.replace(config, limits=Limits(max_kl=0.01, min_agreement=0.9)), quiet=True
    )
    assert not outcome.passed
    assert any("KL is" in failure for failure in outcome.gate.failures)
    assert not json.loads((config.out / "quantization.json").read_text())["passed"]
    assert (config.out / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("lockstep.compress.run.collect", OSError(28, "No space left on device")),
        (
            "lockstep.models.shards.save_file",
            SafetensorError("Error while serializing: No space left on device (os error 28)"),
        ),
    ],
)
def test_a_full_disk_is_named_and_nothing_is_left(
    config: QuantizeConfig, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(where, full)
    with pytest.raises(run.CapacityError, match="is full"):
        run.quantize(config, quiet=True)
    assert list(config.out.parent.iterdir()) == []


def test_what_does_not_go_together_is_refused(config: QuantizeConfig) -> None:
    with pytest.raises(ConfigError, match="int8 cannot be made by awq; what goes together"):
        with_(config, "int8", "awq")
    with pytest.raises(ConfigError, match="gptq needs calibration"):
        with_(config, "int4", "gptq", data=CalibrationConfig(calibration="none"))
    with pytest.raises(ConfigError, match="no fp8"):
        with_(config, "fp8", "rtn", format="gguf")
    with pytest.raises(ConfigError, match="use 32, 64 or 128"):
        choose_scheme("int4", group_size=48, symmetric=False)
    with pytest.raises(ConfigError, match="one scale a channel"):
        choose_scheme("int8", group_size=64, symmetric=False)


def test_too_little_text_is_said_in_numbers(config: QuantizeConfig) -> None:
    data = dataclasses.replace(config.data, num_sequences=10_000)
    with pytest.raises(DataError, match=r"10000 sequences of 32 = 320000"):
        run.quantize(dataclasses.replace(config, data=data), quiet=True)
    assert not config.out.exists()


@pytest.mark.parametrize("names_it_twice", [True, False])
def test_no_document_is_calibrated_on_and_held_out(
    tokenizer: Tokenizer, text_file: Path, names_it_twice: bool
) -> None:
    data = CalibrationConfig(
        calibration=str(text_file),
        held_out=str(text_file) if names_it_twice else None,
        num_sequences=8,
        sequence_length=64,
        held_out_sequences=8,
    )
    texts = load_texts(data, tokenizer, quiet=True)
    assert texts.calibration_SL is not None
    calibrated, held_out = (
        set(re.findall(r"The (\d+)th", tokenizer.decode(tokens.flatten().tolist())))
        for tokens in (texts.calibration_SL, texts.held_out_SL)
    )
    assert len(held_out) > 5
    assert not calibrated & held_out


def test_a_quantised_model_is_not_quantised_again(config: QuantizeConfig, tmp_path: Path) -> None:
    run.quantize(config, quiet=True)
    again = dataclasses.replace(config, model=str(config.out), out=tmp_path / "again")
    with pytest.raises(CheckpointError, match="quanti"):
        run.quantize(again, quiet=True)
