"""Quantised checkpoints: GGUF blocks kept, compressed-tensors read, float weights rounded; and what
makes no sense refused.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lockstep.core.errors import CheckpointError, ConfigError, LockstepError
from lockstep.core.quantization import parse_scheme
from lockstep.kernels.linear import QuantizedWeight, quantize_rtn
from lockstep.models.export import save_hf_folder
from lockstep.models.layers import float_weights
from lockstep.models.loading import load_model

PROMPT = [5, 40, 41, 260, 7, 99, 150, 33]
LogitsOf = Callable[..., torch.Tensor]


def scheme_names(model: Any) -> set[str]:
    """Schemes of the weights a model holds."""
    weights = (getattr(module, "weight", None) for module in model.modules())
    return {w.scheme.name for w in weights if isinstance(w, QuantizedWeight)}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_0", "Q4_1"])
def test_gguf_blocks_are_kept(
    kind: str,
    family: str,
    hf_model: Callable[..., Any],
    write_gguf: Callable[..., Path],
    logits_of: LogitsOf,
    tmp_path: Path,
) -> None:
    """The same values as dequantised, in the row order of the model; close logits."""
    path = write_gguf(hf_model(family), tmp_path / "m.gguf", arch=family, kind=kind)
    native = load_model(path, precision="fp32", weights="native", quiet=True).model
    floats = load_model(path, precision="fp32", quiet=True).model
    assert scheme_names(native) == {kind.lower()}
    theirs = dict(floats.named_parameters())
    kept = dict(float_weights(native))
    assert kept.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in kept.items())
    ours, want = logits_of(native, PROMPT), logits_of(floats, PROMPT)
    assert (ours - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("weights", ["int8", "int4", "int4-g64-asym", "fp8", "q8_0"])
def test_float_weights_are_rounded_while_loading(
    weights: str, hf_folder: Callable[[str], Path], logits_of: LogitsOf
) -> None:
    """Released and trained-on-the-fly models have the bits of the plain one."""
    folder, scheme = hf_folder("llama"), parse_scheme(weights)
    rounded = load_model(folder, weights=weights, quiet=True).model
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    weight = rounded.get_submodule(name).weight
    assert torch.equal(weight.values_NK, quantize_rtn(stored[f"{name}.weight"], scheme).values_NK)
    want = logits_of(rounded, PROMPT)
    packed = load_model(folder, weights=weights, packed=True, quiet=True).model
    assert torch.equal(logits_of(packed, PROMPT), want)
    assert all(p.is_meta for n, p in packed.named_parameters() if n.endswith("_proj.weight"))
    trained = load_model(folder, weights=weights, master_weights=True, quiet=True).model
    assert torch.equal(logits_of(trained, PROMPT), want)
    assert trained.get_submodule(name).weight.requires_grad


def test_released_weights_say_so(hf_folder: Callable[[str], Path]) -> None:
    model = load_model(hf_folder("llama"), packed=True, quiet=True).model
    projection = model.model.layers[0].self_attn.o_proj
    with pytest.raises(ConfigError, match="released to serve in one precision; load it again"):
        projection(torch.zeros(1, 64, dtype=torch.float32))


def compressed(folder: Path, out: Path, weights: dict[str, Any], **described: Any) -> Path:
    """A compressed-tensors folder made by hand from the format's definition, q/k/v/o only."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_bytes())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **described}},
    }
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    bits, size = weights["num_bits"], weights.get("group_size")
    for name, tensor in load_file(out / "model.safetensors").items():
        if ".self_attn." not in name or tensor.dim() != 2:
            tensors[name] = tensor
            continue
        stem, (n, k) = name.removesuffix("weight"), tensor.shape
        groups = 1 if size is None else k // size
        scales = torch.rand(n, groups, generator=generator).mul_(0.01).bfloat16()
        tensors[f"{stem}weight_scale"] = scales
        if bits == 8 and weights["type"] == "int":
            tensors[name] = torch.randint(-127, 128, (n, k), generator=generator).to(torch.int8)
            values = tensors[name].float()
            config["quantization_config"]["format"] = "int-quantized"
        elif bits == 8:
            tensors[name] = torch.randn(n, k, generator=generator).to(torch.float8_e4m3fn)
            values = tensors[name].float()
            config["quantization_config"]["format"] = "float-quantized"
        else:
            config["quantization_config"]["format"] = "pack-quantized"
            signed = torch.randint(-8, 8, (n, k), generator=generator)
            tensors[f"{stem}weight_packed"] = pack(signed)
            tensors[f"{stem}weight_shape"] = torch.tensor([n, k])
            values = signed.float()
            if not weights["symmetric"]:
                zeros = torch.randint(-8, 8, (n, groups), generator=generator)
                tensors[f"{stem}weight_zero_point"] = pack(zeros.t()).t().contiguous()
                values -= zeros.float().repeat_interleave(size, 1)
        wide = scales.float() if size is None else scales.float().repeat_interleave(size, 1)
        tensors[f"expected {name}"] = values * wide
    expected = {n: tensors.pop(n) for n in list(tensors) if n.startswith("expected ")}
    save_file(tensors, out / "model.safetensors")
    save_file(expected, out.with_suffix(".expected"))
    (out / "config.json").write_text(json.dumps(config))
    return out


def pack(signed: torch.Tensor) -> torch.Tensor:
    """Value j of 8 at bits 4j, plus 8, word by word in plain Python."""
    rows = []
    for row in signed.tolist():
        words = []
        for start in range(0, len(row), 8):
            word = sum((value + 8) << (4 * j) for j, value in enumerate(row[start : start + 8]))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "int8",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        {"input_activations": {"num_bits": 8}},
    ),
    ("int8-a16", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}, {}),
    ("int4-g32", {**INT4, "symmetric": True}, {}),
    ("int4-g32-asym", {**INT4, "symmetric": False}, {}),
    ("fp8", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}, {}),
]


@pytest.mark.parametrize(("scheme", "weights", "described"), CASES, ids=[c[0] for c in CASES])
def test_compressed_tensors(
    scheme: str,
    weights: dict[str, Any],
    described: dict[str, Any],
    hf_folder: Callable[[str], Path],
    logits_of: LogitsOf,
    tmp_path: Path,
) -> None:
    folder = compressed(hf_folder("qwen2"), tmp_path / "c", weights, **described)
    native = load_model(folder, quiet=True)
    assert scheme_names(native.model) == {scheme}
    expected = load_file(folder.with_suffix(".expected"))
    kept = dict(float_weights(native.model))
    assert expected
    for name, value in expected.items():
        assert torch.equal(kept[name.removeprefix("expected ")], value), name
    floats = load_model(folder, precision="fp32", weights="float", quiet=True).model
    ours, want = logits_of(native.model, PROMPT), logits_of(floats, PROMPT)
    assert (ours - want).abs().mean() < 0.06 * want.abs().mean()
    assert native.model.model.layers[0].mlp.up_proj.weight.requires_grad
    save_hf_folder(
        native.model, tmp_path / "float", tokenizer=native.tokenizer, dtype="float32", quiet=True
    )
    again = load_file(tmp_path / "float" / "model.safetensors")
    assert torch.equal(
        again["model.layers.0.self_attn.q_proj.weight"],
        kept["model.layers.0.self_attn.q_proj.weight"],
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "gptq"}, "quantised with 'gptq' are not supported"),
        ({"format": "marlin-24"}, "format 'marlin-24' is not supported; use pack-quantized"),
        ({"config_groups": {}}, "config_groups must hold one group"),
        ({"config_groups": {"g": {"weights": {"num_bits": 3}}}}, "weights of 3 bits"),
        ({"config_groups": {"g": {"weights": {"num_bits": "8"}}}}, "num_bits must be an integer"),
        ({"config_groups": {"g": {"weights": {**INT4, "group_size": 48}}}}, "group_size 48"),
    ],
)
def test_unsupported_quantisation_is_named(
    change: dict[str, Any], message: str, hf_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = compressed(hf_folder("llama"), tmp_path / "c", {**INT4, "symmetric": True})
    config = json.loads((folder / "config.json").read_bytes())
    config["quantization_config"].update(change)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_model(folder, quiet=True)


def test_damaged_quantisation_configs_are_errors_of_one_sentence(
    hf_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Whatever stands in the section, and whatever shapes the tensors have."""
    folder = compressed(hf_folder("llama"), tmp_path / "c", {**INT4, "symmetric": False})
    config = json.loads((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    rng = random.Random(1)
    junk = [None, 0, -1, 1e300, "x", [], {}, True, {"weights": []}, 2**40]
    for _ in range(40):
        damaged = json.loads(json.dumps(config))
        section = damaged["quantization_config"]
        while True:
            key = rng.choice(list(section))
            if isinstance(section[key], dict) and section[key] and rng.random() < 0.7:
                section = section[key]
                continue
            section[key] = rng.choice(junk)
            break
        (folder / "config.json").write_text(json.dumps(damaged))
        with suppress(LockstepError):
            load_model(folder, quiet=True)
    (folder / "config.json").write_text(json.dumps(config))
    for part in ("weight_scale", "weight_packed", "weight_zero_point"):
        name = f"model.layers.2.self_attn.v_proj.{part}"
        for bad in (tensors[name][:-1].clone(), tensors[name].double(), tensors[name][0].clone()):
            save_file({**tensors, name: bad}, folder / "model.safetensors")
            if part == "weight_scale" and bad.dtype == torch.float64:
                continue
            with pytest.raises(CheckpointError):
                load_model(folder, quiet=True)


def test_combinations_that_make_no_sense(hf_folder: Callable[[str], Path], tmp_path: Path) -> None:
    floats = hf_folder("llama")
    folder = compressed(floats, tmp_path / "c", {**INT4, "symmetric": True})
    with pytest.raises(ConfigError, match=r"nothing to keep; use int4, int4-a16, int8"):
        load_model(floats, weights="native", quiet=True)
    with pytest.raises(ConfigError, match="quantised already; leave weights unset"):
        load_model(folder, weights="int8", quiet=True)
    with pytest.raises(ConfigError, match="cannot be trained in full; train a LoRA adapter"):
        load_model(folder, master_weights=True, quiet=True)
    with pytest.raises(ConfigError, match="multiple of 256 inputs, the weight has 64; use q8_0"):
        load_model(floats, weights="q4_k", quiet=True)
    with pytest.raises(ConfigError, match="'int3' is unknown"):
        load_model(floats, weights="int3", quiet=True)
