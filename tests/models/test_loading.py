from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.core.errors import CheckpointError, ConfigError
from lockstep.models.loading import load_model

NORM = "model.norm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(hf_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a good checkpoint, to be damaged."""
    return Path(shutil.copytree(hf_folder("qwen3"), tmp_path / "copy"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_json(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**value, **changes}))


def shard(folder: Path) -> dict[str, str]:
    """Split the single file into two with an index, and return the index's map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in files.items() for name in held}
    edit_json(folder / "model.safetensors.index.json", weight_map=weight_map)
    return weight_map


def load(folder: Path, **options: Any) -> Any:
    return load_model(folder, quiet=True, **options)


def test_what_comes_back(folder: Path) -> None:
    loaded = load(folder)
    assert (loaded.name, loaded.folder) == (str(folder), folder)
    assert loaded.config == loaded.model.config
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the end")) == "the end"


@pytest.mark.parametrize(
    ("precision", "master_weights", "param_dtype", "compute_dtype"),
    [
        ("fp32", False, torch.float32, torch.float32),
        ("bf16", False, torch.bfloat16, torch.bfloat16),
        ("bf16", True, torch.float32, torch.bfloat16),
    ],
)
def test_precision_and_master_weights(
    folder: Path,
    precision: str,
    master_weights: bool,
    param_dtype: torch.dtype,
    compute_dtype: torch.dtype,
) -> None:
    stored = load_file(folder / "model.safetensors")
    model = load(folder, precision=precision, master_weights=master_weights).model
    assert model.compute_dtype == compute_dtype
    for name, parameter in model.named_parameters():
        assert parameter.dtype == param_dtype
        assert parameter.requires_grad
        assert torch.equal(parameter, stored[name].to(param_dtype))


def test_master_weights_do_not_change_a_bit_of_what_is_computed(
    folder: Path, logits_of: Callable[..., torch.Tensor]
) -> None:
    plain = load(folder, precision="bf16").model
    master = load(folder, precision="bf16", master_weights=True).model
    tokens = list(range(40))
    assert torch.equal(logits_of(plain, tokens), logits_of(master, tokens))


def test_parameters_are_not_views_of_the_file(folder: Path) -> None:
    parameter = dict(load(folder, precision="fp32").model.named_parameters())[NORM]
    with torch.no_grad():
        parameter.zero_()
    assert load_file(folder / "model.safetensors")[NORM].abs().sum() > 0


def test_shards_are_one_model(folder: Path) -> None:
    whole = dict(load(folder, precision="fp32").model.named_parameters())
    shard(folder)
    for name, parameter in load(folder, precision="fp32").model.named_parameters():
        assert torch.equal(parameter, whole[name])


def test_end_tokens_of_both_files_count(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[0, 2], temperature=0.6)
    loaded = load(folder)
    assert loaded.config.eos_token_ids == (2, 0)
    assert loaded.generation_config["temperature"] == 0.6


def test_a_tied_head_that_is_stored_is_not_unexpected(
    hf_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(hf_folder("llama"), tmp_path / "copy"))
    rewrite(
        copy,
        lambda t: t.update(
            {
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
            }
        ),
    )
    load(copy)


Damage = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: rewrite(f, lambda t: t.pop(NORM)),
            r"it lacks 1 tensors \(model.norm.weight\)$",
        ),
        (
            lambda f: rewrite(f, lambda t: [t.pop(n) for n in list(t) if "mlp" in n]),
            r"lacks 9 tensors \(model.layers.0.mlp.gate_proj.weight, .* and 6 more\)",
        ),
        (
            lambda f: rewrite(f, lambda t: t.update(odd=torch.ones(2))),
            r"it has unexpected 1 tensors \(odd\)",
        ),
        (
            lambda f: rewrite(f, lambda t: t.update({DOWN: torch.ones(64, 95)})),
            r"misshapen 1 tensors \(.*down_proj.weight \(64, 95\) instead of \(64, 96\)\)",
        ),
        (
            lambda f: edit_json(f / "config.json", num_hidden_layers=9_999),
            r"model.layers.9998.self_attn.k_proj.weight is not there, expected shape \(64, 64\)",
        ),
        (
            lambda f: edit_json(f / "config.json", head_dim=2**30),
            r"k_proj.weight has shape \(64, 64\), expected shape \(2147483648, 64\)",
        ),
        (lambda f: edit_json(f / "config.json", vocab_size=100), "the model only 100"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{,"), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object, got list"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda f: (f / "generation_config.json").write_text("x"), "generation_config.json"),
    ],
)
def test_damage_is_one_sentence(folder: Path, damage: Damage, message: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.5, 0.999])
def test_truncated_weights_are_one_sentence(folder: Path, share: float) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match="truncated or not a safetensors file"):
        load(folder)


def test_pickles_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"convert its \.bin files to safetensors first"):
        load(folder)


def test_an_index_must_be_true(folder: Path) -> None:
    weight_map = shard(folder)
    index = folder / "model.safetensors.index.json"
    edit_json(index, weight_map={**weight_map, NORM: "a.safetensors"})
    with pytest.raises(CheckpointError, match=r"a.safetensors lacks 1 tensors its index announces"):
        load(folder)
    edit_json(index, weight_map={**weight_map, NORM: "../elsewhere"})
    with pytest.raises(CheckpointError, match=r"places model.norm.weight in '../elsewhere'"):
        load(folder)
    edit_json(index, weight_map={})
    with pytest.raises(CheckpointError, match="has no weight_map"):
        load(folder)
    edit_json(index, weight_map=weight_map)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks b.safetensors, which its index names"):
        load(folder)


def test_precision_must_be_known(folder: Path) -> None:
    with pytest.raises(ConfigError, match="precision is 'fp16'; use fp32 or bf16"):
        load(folder, precision="fp16")
