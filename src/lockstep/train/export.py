"""From trained weights, in memory or in a checkpoint, to folders that other tools read.

A checkpoint of SFT or RL holds what was trained and the settings of its run, which name the base
model; together they are the whole model again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.core.errors import CheckpointError
from lockstep.models.export import save_adapter, save_hf_folder
from lockstep.models.loading import LoadedModel, load_model
from lockstep.models.lora import apply_lora, merge_lora
from lockstep.models.lora_config import LoraConfig
from lockstep.train import checkpoint


@dataclass(frozen=True, kw_only=True)
class ExportedFolders:
    """Where the results lie."""

    model: Path
    """The whole model, LoRA merged, as a Hugging Face folder."""
    adapter: Path | None
    """The LoRA adapter, as PEFT stores it; None after full fine-tuning."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model with the weights of a checkpoint, its adapters still apart."""

    loaded: LoadedModel
    lora: LoraConfig | None


def export_trained(trained: TrainedModel, out: Path, *, quiet: bool = False) -> ExportedFolders:
    """Write `out/model`, and `out/adapter` for LoRA, whose adapters are merged in the process."""
    loaded, adapter = trained.loaded, None
    if trained.lora is not None:
        adapter = out / "adapter"
        save_adapter(loaded.model, adapter, trained.lora, base_model=str(loaded.folder))
        merge_lora(loaded.model)
    save_hf_folder(
        loaded.model,
        out / "model",
        tokenizer=loaded.tokenizer,
        generation_config=loaded.generation_config,
        dtype="float32" if loaded.model.compute_dtype == torch.float32 else "bfloat16",
        quiet=quiet,
    )
    return ExportedFolders(model=out / "model", adapter=adapter)


def load_trained(folder: Path) -> TrainedModel:
    """The model of a `checkpoint-<step>` folder; CheckpointError if it or its base changed."""
    checkpoint.verify(folder)
    config = checkpoint.read_config(folder)
    settings = config.get("settings", {})
    try:
        name, precision, lora = settings["model"], settings["precision"], settings["lora"]
    except (KeyError, TypeError):
        raise CheckpointError(f"{folder} was not written by lockstep sft or rl") from None
    lora = None if lora is None else _lora_config(lora)
    loaded = load_model(
        name,
        precision=precision,
        weights=settings.get("quantization"),
        master_weights=lora is None,
    )
    if lora is not None:
        apply_lora(loaded.model, lora)
    if checkpoint.fingerprint_frozen(loaded.model) != config.get("frozen_weights_sha256"):
        raise CheckpointError(
            f"{loaded.folder} is not the model that {folder} was trained on: its frozen weights "
            "have another sha256; restore the original base model"
        )
    checkpoint.load_parameters(folder, loaded.model)
    return TrainedModel(loaded=loaded, lora=lora)


def load_merged(folder: Path) -> LoadedModel:
    """The model of a `checkpoint-<step>` folder as one, its adapters folded in."""
    trained = load_trained(folder)
    if trained.lora is not None:
        merge_lora(trained.loaded.model)
    return trained.loaded


def _lora_config(settings: Mapping[str, Any]) -> LoraConfig:
    return LoraConfig(**{**settings, "targets": tuple(settings["targets"])})
