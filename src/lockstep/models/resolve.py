"""What a user means by MODEL: a known name, a Hugging Face folder, or a GGUF file. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.core.errors import CheckpointError
from lockstep.models.assets import ASSETS


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model on disk."""

    name: str
    """As the user gave it."""
    path: Path
    """A folder (`hf`) or a file (`gguf`)."""
    format: Literal["hf", "gguf"]


def resolve_model(model: str | Path) -> ModelSource:
    """Find `model`, fetching it first if it is a known name that is not in the cache yet."""
    name = str(model)
    if name in ASSETS:
        from lockstep.models.fetch import fetch_model  # the converter needs torch

        return ModelSource(name=name, path=fetch_model(name), format="hf")
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSource(name=name, path=path, format="hf")
    if path.is_file():
        return ModelSource(name=name, path=path, format=_format_of_file(path))
    raise CheckpointError(
        f"no model {name!r}: it is neither a folder nor a file, nor one of {', '.join(ASSETS)}"
    )


def _format_of_file(path: Path) -> Literal["gguf"]:
    if path.suffix == ".safetensors" or path.name == "config.json":
        raise CheckpointError(f"{path} is part of a checkpoint; give its folder, {path.parent}")
    return "gguf"  # whatever else it is, opening it says in one sentence that it is not GGUF
