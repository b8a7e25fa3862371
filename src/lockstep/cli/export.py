"""`lockstep export`: write a model as a Hugging Face folder, an adapter merged in if there is
one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cyclopts import App

from lockstep.core.errors import ConfigError
from lockstep.core.files import replacing_folder
from lockstep.models.export import (
    ADAPTER_CONFIG,
    load_adapter_weights,
    read_adapter_config,
    save_checkpoint,
    save_hf_folder,
)
from lockstep.models.loading import load_model, open_checkpoint
from lockstep.models.lora import apply_lora, merge_lora
from lockstep.models.resolve import resolve_model

command = App(name="export")


@command.default
def export(
    model: str,
    out: Path,
    *,
    adapter: Path | None = None,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    max_shard_gb: float = 5.0,
) -> None:
    """Write a model as a Hugging Face folder and print it.

    Parameters
    ----------
    model
        A name such as smollm2, a Hugging Face folder, a GGUF file, or a PEFT adapter folder,
        which is then merged into the base model it names.
    out
        Folder to make; must not exist yet, or be empty.
    adapter
        PEFT adapter folder to merge into the model.
    dtype
        What the weights are rounded to.
    max_shard_gb
        Weights are cut into files of at most this many 10^9 bytes.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty; choose another folder")
    if max_shard_gb <= 0:
        raise ConfigError(f"--max-shard-gb must be above 0, got {max_shard_gb:g}")
    max_shard_bytes = int(max_shard_gb * 10**9)
    if adapter is None and (Path(model) / ADAPTER_CONFIG).is_file():
        adapter = Path(model)
        model = _base_of(adapter)
    with replacing_folder(out) as folder:
        if adapter is None:
            checkpoint = open_checkpoint(resolve_model(model))
            save_checkpoint(checkpoint, folder, dtype=dtype, max_shard_bytes=max_shard_bytes)
        else:
            _merge_and_save(model, adapter, folder, dtype, max_shard_bytes)
    print(out)


def _base_of(adapter: Path) -> str:
    _, base = read_adapter_config(adapter)
    if not base:
        raise ConfigError(
            f"{adapter} names no base model; run: lockstep export BASE OUT --adapter {adapter}"
        )
    return base


def _merge_and_save(
    model: str,
    adapter: Path,
    folder: Path,
    dtype: Literal["bfloat16", "float32"],
    max_shard_bytes: int,
) -> None:
    config, _ = read_adapter_config(adapter)
    # In float32, so that merging rounds once, when the result is stored.
    loaded = load_model(model, precision="fp32")
    apply_lora(loaded.model, config)
    load_adapter_weights(loaded.model, adapter)
    merge_lora(loaded.model)
    save_hf_folder(
        loaded.model,
        folder,
        tokenizer=loaded.tokenizer,
        generation_config=loaded.generation_config,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )
