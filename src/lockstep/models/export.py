"""From a model in memory to the formats other tools read: a Hugging Face folder, a PEFT adapter.

Weights are written tensor by tensor into shards, so at most one shard is held in memory besides the
model. Every file is replaced atomically.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.core.errors import CheckpointError
from lockstep.core.files import replacing, write_json
from lockstep.core.json_fields import JsonFields
from lockstep.core.model_config import ModelConfig
from lockstep.core.progress import Progress
from lockstep.models.hf_folder import read_json
from lockstep.models.layers import float_weights
from lockstep.models.llama import Llama
from lockstep.models.loading import Checkpoint
from lockstep.models.lora import LoraLinear, lora_state_dict
from lockstep.models.lora_config import LoraConfig
from lockstep.models.shards import ShardWriter
from lockstep.text.tokenizer import Tokenizer

ExportDtype = Literal["float32", "bfloat16"]
DEFAULT_SHARD_BYTES = 5 * 10**9
"""What Hugging Face's own tools use."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


def save_hf_folder(
    model: Llama,
    folder: Path,
    *,
    tokenizer: Tokenizer,
    generation_config: Mapping[str, Any] | None = None,
    dtype: ExportDtype = "bfloat16",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    quiet: bool = False,
) -> None:
    """Write the model as a Hugging Face checkpoint folder. Adapters must be merged before;
    quantised weights are written as floats.
    """
    if adapted := [
        name for name, module in model.named_modules() if isinstance(module, LoraLinear)
    ]:
        raise CheckpointError(
            f"{len(adapted)} projections still have LoRA adapters (first {adapted[0]}); "
            "merge them before saving, or save the adapter alone"
        )
    _save(
        folder,
        model.config,
        float_weights(model),
        total=len(list(model.named_parameters())),
        tokenizer=tokenizer,
        generation_config=generation_config or {},
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        quiet=quiet,
    )


def save_checkpoint(
    checkpoint: Checkpoint,
    folder: Path,
    *,
    dtype: ExportDtype = "bfloat16",
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    quiet: bool = False,
) -> None:
    """Convert a checkpoint of any kind to a Hugging Face folder, without building the model."""
    _save(
        folder,
        checkpoint.config,
        ((name, checkpoint.read(name)) for name in checkpoint.shapes),
        total=len(checkpoint.shapes),
        tokenizer=checkpoint.tokenizer(),
        generation_config=checkpoint.generation_config,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        quiet=quiet,
    )


def save_adapter(model: Llama, folder: Path, config: LoraConfig, *, base_model: str) -> None:
    """Write the model's LoRA adapters as a PEFT folder; `base_model` is a name or path for its
    config.
    """
    tensors = {
        _PEFT_PREFIX + name: p.detach().float().contiguous()
        for name, p in lora_state_dict(model).items()
    }
    if not tensors:
        raise CheckpointError("the model has no LoRA adapters to save")
    _save_tensors(tensors, folder / ADAPTER_WEIGHTS)
    write_json(
        folder / ADAPTER_CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": config.r,
            "lora_alpha": config.alpha,
            "target_modules": list(config.targets),
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
            "inference_mode": True,
        },
    )


def read_adapter_config(folder: Path) -> tuple[LoraConfig, str | None]:
    """The LoRA settings of a PEFT folder, and the base model it names."""
    config = read_json(folder / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{folder}: peft_type {config.get('peft_type')!r} is not LORA")
    for key in ("use_dora", "use_rslora", "modules_to_save", "alpha_pattern", "rank_pattern"):
        if config.get(key):
            raise CheckpointError(f"{folder}: {key} is set, which is not supported")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{folder}: adapters with trained biases are not supported")
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        raise CheckpointError(f"{folder}: target_modules must be a list of names, got {targets!r}")
    fields = JsonFields(config, where=str(folder / ADAPTER_CONFIG))
    lora = LoraConfig(
        r=fields.count("r"), alpha=fields.real("lora_alpha"), targets=tuple(sorted(targets))
    )
    return lora, config.get("base_model_name_or_path")


@torch.no_grad()
def load_adapter_weights(model: Llama, folder: Path) -> None:
    """Copy a PEFT folder's tensors into the adapters `apply_lora` gave the model."""
    path = folder / ADAPTER_WEIGHTS
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    wanted = lora_state_dict(model)
    got = {name.removeprefix(_PEFT_PREFIX): tensor for name, tensor in stored.items()}
    if got.keys() != wanted.keys():
        odd = sorted(got.keys() ^ wanted.keys())
        raise CheckpointError(
            f"{path} does not fit the model: {len(odd)} tensors differ, first {odd[0]}"
        )
    for name, parameter in wanted.items():
        if parameter.shape != got[name].shape:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(got[name].shape)}, "
                f"the model wants {tuple(parameter.shape)}"
            )
        parameter.copy_(got[name])


def _save(
    folder: Path,
    config: ModelConfig,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    total: int,
    tokenizer: Tokenizer,
    generation_config: Mapping[str, Any],
    dtype: ExportDtype,
    max_shard_bytes: int,
    quiet: bool,
) -> None:
    torch_dtype = getattr(torch, dtype)
    with Progress(quiet=quiet) as progress:
        tracked = progress.track(tensors, "save weights", total=total, unit="tensors")
        shards = ShardWriter(folder, max_shard_bytes)
        for name, tensor in tracked:
            shards.add(name, tensor.to(torch_dtype))
        shards.finish()
    write_json(folder / "config.json", config.to_hf(dtype=dtype))
    write_json(folder / "generation_config.json", generation_config_of(config, generation_config))
    tokenizer.save(folder)


def generation_config_of(config: ModelConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """What generation_config.json is to hold: what was given, and the model's end tokens."""
    ends = list(config.eos_token_ids)
    found = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
    }
    return {**{key: value for key, value in found.items() if value not in (None, [])}, **given}


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
