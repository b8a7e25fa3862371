"""The gate on finished models: the figures of the run that made them, bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli.quantize import EXIT_GATE_FAILED
from lockstep.cli.quantize import quantize as quantize_command
from lockstep.compress import run
from lockstep.compress.check import check
from lockstep.compress.config import (
    CalibrationConfig,
    CheckConfig,
    Limits,
    QuantizeConfig,
    choose_scheme,
)
from lockstep.compress.gate import GateReport
from lockstep.core.errors import ConfigError
from lockstep.core.model_config import ModelConfig
from lockstep.models.export import save_hf_folder
from lockstep.models.llama import Llama
from lockstep.text.tokenizer import Tokenizer


@pytest.fixture
def data(text_file: Path) -> CalibrationConfig:
    return CalibrationConfig(
        calibration=str(text_file), num_sequences=4, sequence_length=32, held_out_sequences=4
    )


def figures(gate: GateReport) -> dict[str, Any]:
    return {**dataclasses.asdict(gate), "limits": None, "layers": None}


@pytest.mark.parametrize(
    ("family", "method", "format", "weights"),
    [
        ("int8", "smoothquant", "compressed-tensors", None),
        ("int4", "gptq", "compressed-tensors", None),
        ("int4", "awq", "compressed-tensors", None),
        ("fp8", "rtn", "compressed-tensors", None),
        ("int4", "gptq", "gguf", "native"),
    ],
)
def test_a_loaded_model_computes_what_its_gate_did(
    tiny_model: Path,
    data: CalibrationConfig,
    tmp_path: Path,
    family: str,
    method: Any,
    format: Any,
    weights: str | None,
) -> None:
    config = QuantizeConfig(
        model=str(tiny_model),
        out=tmp_path / "out",
        scheme=choose_scheme(family, group_size=None, symmetric=False),
        method=method,
        format=format,
        data=data,
    )
    outcome = run.quantize(config, quiet=True)
    checked = config.out / "model.gguf" if format == "gguf" else config.out
    gate = check(
        CheckConfig(original=str(tiny_model), checked=str(checked), weights=weights, data=data),
        quiet=True,
    )
    assert figures(gate) == {
        **figures(outcome.gate),
        "max_perplexity_increase": 0.04 if family == "int4" else 0.01,
    }


def test_keys_and_values_in_fewer_bits_are_judged(
    tiny_model: Path, data: CalibrationConfig
) -> None:
    same = CheckConfig(original=str(tiny_model), checked=str(tiny_model), data=data)
    assert check(same, quiet=True).kl_mean == 0
    by_dtype = {
        dtype: check(
            dataclasses.replace(same, kv_cache_dtype=dtype, limits=Limits(max_kl=0.0)), quiet=True
        )
        for dtype in ("int8", "fp8")
    }
    assert 0 < by_dtype["int8"].kl_mean < by_dtype["fp8"].kl_mean < 0.01
    assert "KL is" in by_dtype["int8"].failures[0]


def test_the_command_exits_as_the_gate_says(
    tiny_model: Path, data: CalibrationConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(**options: Any) -> int:
        return quantize_command(str(tiny_model), tiny_model, check_only=True, data=data, **options)

    assert command() == 0
    assert "same likeliest token: 100.00%" in capsys.readouterr().out
    assert command(weights="int4-g128", max_kl=1e-9) == EXIT_GATE_FAILED
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"lockstep: {tiny_model}: ")
    assert "nats a token" in error


def test_models_of_different_vocabularies_are_not_compared(
    tiny_model: Path, data: CalibrationConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = Llama(
        ModelConfig(
            architecture="LlamaForCausalLM",
            vocab_size=328,
            hidden_size=32,
            intermediate_size=32,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            max_position=64,
        )
    )
    model.initialise(seed=0)
    save_hf_folder(model, tmp_path / "other", tokenizer=tokenizer, dtype="float32", quiet=True)
    config = CheckConfig(original=str(tiny_model), checked=str(tmp_path / "other"), data=data)
    with pytest.raises(ConfigError, match=r"do not share a vocabulary \(328 and 320 tokens\)"):
        check(config, quiet=True)
