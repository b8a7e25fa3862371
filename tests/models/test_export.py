from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.cli.main import run
from lockstep.core.errors import CheckpointError, ConfigError
from lockstep.models.export import (
    load_adapter_weights,
    read_adapter_config,
    save_adapter,
    save_hf_folder,
)
from lockstep.models.llama import Llama
from lockstep.models.loading import LoadedModel, load_model
from lockstep.models.lora import LoraConfig, apply_lora, lora_state_dict, merge_lora

PROMPT = list(range(50, 90))
LORA = LoraConfig(r=3, alpha=6.0, targets=("q_proj", "down_proj"))

LogitsOf = Callable[..., torch.Tensor]


def load(path: Path | str) -> LoadedModel:
    return load_model(path, precision="fp32", quiet=True)


def save(loaded: LoadedModel, folder: Path, **options: Any) -> None:
    save_hf_folder(
        loaded.model,
        folder,
        tokenizer=loaded.tokenizer,
        quiet=True,
        **{"dtype": "float32", **options},
    )


def adapted(folder: Path) -> LoadedModel:
    """A model with adapters that do something."""
    loaded = load(folder)
    apply_lora(loaded.model, LORA, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in lora_state_dict(loaded.model).items():
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=generator)
    return loaded


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "llama-biases",
        "llama3-rope",
        "yarn-rope",
        "mistral",
        "qwen2",
        "qwen2-window",
        "qwen3",
    ],
)
def test_what_we_save_is_the_same_model_to_us_and_to_transformers(
    family: str, hf_folder: Callable[[str], Path], logits_of: LogitsOf, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = load(hf_folder(family))
    save(loaded, tmp_path)
    logits = logits_of(loaded.model, PROMPT)
    again = load(tmp_path)
    assert again.config == loaded.config
    assert torch.equal(logits_of(again.model, PROMPT), logits)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    assert (logits - expected).abs().max() < 2e-3
    assert theirs.generation_config.eos_token_id == 2
    text = "the end 12"
    assert AutoTokenizer.from_pretrained(tmp_path).encode(text) == again.tokenizer.encode(text)


def test_bfloat16_rounds_once(hf_folder: Callable[[str], Path], tmp_path: Path) -> None:
    loaded = load(hf_folder("qwen2"))
    save(loaded, tmp_path, dtype="bfloat16")
    stored = load_file(tmp_path / "model.safetensors")
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(stored[name], parameter.bfloat16())
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("max_shard_bytes", [1, 30_000, 10**9])
def test_shards(max_shard_bytes: int, hf_folder: Callable[[str], Path], tmp_path: Path) -> None:
    loaded = load(hf_folder("qwen3"))
    save(loaded, tmp_path, max_shard_bytes=max_shard_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert not list(tmp_path.glob("*.partial"))
    if max_shard_bytes == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(p.nbytes for p in loaded.model.parameters())
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        for file in files:
            held = load_file(file)
            assert all(index["weight_map"][name] == file.name for name in held)
            assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= max_shard_bytes
    theirs = dict(load(tmp_path).model.named_parameters())
    assert all(torch.equal(p, theirs[name]) for name, p in loaded.model.named_parameters())


def test_generation_settings_are_kept(hf_folder: Callable[[str], Path], tmp_path: Path) -> None:
    save(load(hf_folder("llama")), tmp_path, generation_config={"temperature": 0.6})
    written = json.loads((tmp_path / "generation_config.json").read_text())
    assert written == {"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.6}


def test_adapters_must_be_merged_or_saved_alone(
    hf_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="6 projections still have LoRA adapters"):
        save(adapted(hf_folder("llama")), tmp_path)
    with pytest.raises(CheckpointError, match="no LoRA adapters to save"):
        save_adapter(load(hf_folder("llama")).model, tmp_path, LORA, base_model="x")


def test_an_adapter_comes_back(
    hf_folder: Callable[[str], Path], logits_of: LogitsOf, tmp_path: Path
) -> None:
    loaded = adapted(hf_folder("llama"))
    save_adapter(loaded.model, tmp_path, LORA, base_model="some/base")
    config, base = read_adapter_config(tmp_path)
    assert (config.r, config.alpha, base) == (3, 6.0, "some/base")
    assert set(config.targets) == set(LORA.targets)
    again = load(hf_folder("llama"))
    apply_lora(again.model, config, seed=99)
    load_adapter_weights(again.model, tmp_path)
    assert torch.equal(logits_of(again.model, PROMPT), logits_of(loaded.model, PROMPT))


def test_an_adapter_has_pefts_names(hf_folder: Callable[[str], Path], tmp_path: Path) -> None:
    save_adapter(adapted(hf_folder("llama")).model, tmp_path, LORA, base_model="b")
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0"
    assert tensors[f"{prefix}.self_attn.q_proj.lora_A.weight"].shape == (3, 64)
    assert tensors[f"{prefix}.mlp.down_proj.lora_B.weight"].shape == (64, 3)
    assert len(tensors) == 2 * 3 * len(LORA.targets)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"]) == (3, 6.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not LORA"),
        ({"use_dora": True}, "use_dora is set, which is not supported"),
        ({"bias": "all"}, "trained biases"),
        ({"target_modules": "all-linear"}, "must be a list of names, got 'all-linear'"),
        ({"r": 0}, "r must be an integer from 1"),
    ],
)
def test_adapters_we_cannot_use_are_refused(
    changes: dict[str, Any], message: str, hf_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    save_adapter(adapted(hf_folder("llama")).model, tmp_path, LORA, base_model="b")
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message):
        read_adapter_config(tmp_path)


def test_an_adapter_of_another_model_is_refused(
    hf_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    save_adapter(adapted(hf_folder("llama")).model, tmp_path, LORA, base_model="b")
    other = load(hf_folder("llama")).model
    apply_lora(other, LoraConfig(r=3, alpha=6.0, targets=("q_proj",)))
    with pytest.raises(CheckpointError, match="does not fit the model: 6 tensors differ"):
        load_adapter_weights(other, tmp_path)
    wider = load(hf_folder("llama")).model
    apply_lora(wider, LoraConfig(r=4, alpha=6.0, targets=LORA.targets))
    with pytest.raises(CheckpointError, match=r"has shape \(3, 64\), the model wants \(4, 64\)"):
        load_adapter_weights(wider, tmp_path)


def merged_logits(folder: Path, logits_of: LogitsOf) -> torch.Tensor:
    model: Llama = adapted(folder).model
    merge_lora(model)
    return logits_of(model, PROMPT)


def test_the_command_merges_an_adapter_into_the_base_it_names(
    hf_folder: Callable[[str], Path], logits_of: LogitsOf, tmp_path: Path
) -> None:
    base, adapter = hf_folder("llama"), tmp_path / "adapter"
    save_adapter(adapted(base).model, adapter, LORA, base_model=str(base))
    expected = merged_logits(base, logits_of)
    by_name = ["export", str(adapter), str(tmp_path / "a"), "--dtype", "float32"]
    by_flag = ["export", str(base), str(tmp_path / "b"), "--adapter", str(adapter)]
    assert run(by_name) == 0
    assert run([*by_flag, "--dtype", "float32"]) == 0
    for name in ("a", "b"):
        assert torch.equal(logits_of(load(tmp_path / name).model, PROMPT), expected)


def test_the_command_converts(
    hf_folder: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "new"
    assert run(["export", str(hf_folder("qwen3")), str(out), "--max-shard-gb", "0.00003"]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert len(list(out.glob("*.safetensors"))) > 1
    assert load_model(out, quiet=True).config == load(hf_folder("qwen3")).config


def test_the_command_overwrites_nothing(hf_folder: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        run(["export", str(hf_folder("qwen3")), str(tmp_path)])
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]
