"""A Hugging Face checkpoint folder: config.json, tokenizer and safetensors, whole or in shards.

Only headers are read on opening; a tensor is read when asked for. PyTorch pickles
(`pytorch_model.bin`) are not read: loading one can run whatever it contains.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lockstep.core.errors import CheckpointError
from lockstep.core.model_config import ModelConfig
from lockstep.kernels.linear import QuantizedWeight
from lockstep.models.compressed_tensors import logical_shapes, read_weight, scheme_of_config
from lockstep.text.tokenizer import Tokenizer

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class HfFolder:
    """A checkpoint (see `lockstep.models.loading.Checkpoint`) in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        described = read_json(path / "config.json")
        self._scheme = scheme_of_config(described, where=str(path / "config.json"))
        described.pop("quantization_config", None)
        self.config = ModelConfig.from_hf(described)
        generation = path / "generation_config.json"
        self.generation_config: Mapping[str, Any] = (
            read_json(generation) if generation.is_file() else {}
        )
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, expected in _weight_files(path).items():
            self._open(path / name, expected)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor of the model, whatever it is stored as."""
        return self._shapes if self._scheme is None else logical_shapes(self._shapes)

    @property
    def is_quantized(self) -> bool:
        return self._scheme is not None

    def read(self, name: str) -> torch.Tensor:
        """One tensor in the dtype it is stored in; dequantised to float32 where it is quantised."""
        quantized = self.read_quantized(name)
        return self._stored(name) if quantized is None else quantized.dequantize()

    def read_quantized(self, name: str) -> QuantizedWeight | None:
        """A weight as it is stored, None where that is as floats."""
        module, _, leaf = name.rpartition(".")
        if self._scheme is None or leaf != "weight":
            return None
        return read_weight(module, self._shapes, self._stored, self._scheme)

    def _stored(self, name: str) -> torch.Tensor:
        # Opened anew: what was read of a mapped file counts as memory while it stays open.
        with safe_open(self._files[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.path)

    def _open(self, file: Path, expected: set[str] | None) -> None:
        """Take in the tensors of one file, which must be those the index announced."""
        if not file.is_file():
            raise CheckpointError(f"{file.parent} lacks {file.name}, which its index names")
        try:
            with safe_open(file, framework="pt") as opened:
                names = set(opened.keys())
                shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} is truncated or not a safetensors file ({error}); fetch it again"
            ) from error
        if expected is not None and (missing := sorted(expected - names)):
            raise CheckpointError(
                f"{file} lacks {len(missing)} tensors its index announces, first {missing[0]}"
            )
        for name in names if expected is None else expected:
            self._files[name] = file
            self._shapes[name] = shapes[name]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent} has no {path.name}") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _weight_files(path: Path) -> dict[str, set[str] | None]:
    """File name to the tensors wanted from it; None means all it has."""
    if (path / INDEX_NAME).is_file():
        weight_map = read_json(path / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX_NAME} has no weight_map")
        files: dict[str, set[str] | None] = {}
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{path / INDEX_NAME} places {tensor} in {name!r}")
            wanted = files.setdefault(name, set())
            assert wanted is not None
            wanted.add(tensor)
        return files
    if (path / SINGLE_NAME).is_file():
        return {SINGLE_NAME: None}
    has_pickles = any(path.glob("*.bin"))
    raise CheckpointError(
        f"{path} has neither {SINGLE_NAME} nor {INDEX_NAME}"
        + ("; convert its .bin files to safetensors first" if has_pickles else "")
    )
