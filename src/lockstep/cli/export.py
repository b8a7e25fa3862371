"""`lockstep export`: write a model as a Hugging Face folder, its adapter merged in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import App

from lockstep.core.errors import ConfigError
from lockstep.core.files import replacing_folder

if TYPE_CHECKING:
    from lockstep.models.loading import LoadedModel

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
        A name such as smollm2, a Hugging Face folder, a GGUF file, a checkpoint-<step> folder of
        a training run, or a PEFT adapter folder, which is merged into the base model it names.
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
    # Torch takes two seconds to import, which --help need not pay.
    from lockstep.models.export import save_checkpoint, save_hf_folder
    from lockstep.models.loading import open_checkpoint
    from lockstep.models.resolve import resolve_model

    max_shard_bytes = int(max_shard_gb * 10**9)
    trained = _trained_model(model, adapter)
    with replacing_folder(out) as folder:
        if trained is None:
            checkpoint = open_checkpoint(resolve_model(model))
            save_checkpoint(checkpoint, folder, dtype=dtype, max_shard_bytes=max_shard_bytes)
        else:
            save_hf_folder(
                trained.model,
                folder,
                tokenizer=trained.tokenizer,
                generation_config=trained.generation_config,
                dtype=dtype,
                max_shard_bytes=max_shard_bytes,
            )
    print(out)


def _trained_model(model: str, adapter: Path | None) -> LoadedModel | None:
    """A checkpoint's or adapter's weights merged into their base; None for any other model."""
    from lockstep.models.export import ADAPTER_CONFIG
    from lockstep.train.checkpoint import is_checkpoint
    from lockstep.train.export import load_merged

    if adapter is None and is_checkpoint(Path(model)):
        return load_merged(Path(model))
    if adapter is None and (Path(model) / ADAPTER_CONFIG).is_file():
        adapter = Path(model)
        model = _base_of(adapter)
    return None if adapter is None else _with_adapter(model, adapter)


def _base_of(adapter: Path) -> str:
    from lockstep.models.export import read_adapter_config

    _, base = read_adapter_config(adapter)
    if not base:
        raise ConfigError(
            f"{adapter} names no base model; run: lockstep export BASE OUT --adapter {adapter}"
        )
    return base


def _with_adapter(model: str, adapter: Path) -> LoadedModel:
    """In float32, so that merging rounds once, when the result is stored."""
    from lockstep.models.export import load_adapter_weights, read_adapter_config
    from lockstep.models.loading import load_model
    from lockstep.models.lora import apply_lora, merge_lora

    config, _ = read_adapter_config(adapter)
    loaded = load_model(model, precision="fp32")
    apply_lora(loaded.model, config)
    load_adapter_weights(loaded.model, adapter)
    merge_lora(loaded.model)
    return loaded
