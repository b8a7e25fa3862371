"""Training checkpoints: whole or absent, verified before use, enough to continue to the same bits.

A folder `checkpoint-<step>` holds the trainable fp32 parameters, the optimizer's state, torch's
random state, the caller's own state (the place in the data), the run's configuration, and
`manifest.json` with the sha256 of each. It is written under a hidden name, synced and renamed, so
a crash at any instant leaves the last good one. Frozen weights are not stored: the caller puts
their fingerprint into the configuration instead.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lockstep.core.errors import CheckpointError, ConfigError
from lockstep.core.files import replacing_folder, sha256_of, write_json
from lockstep.models.layers import quantized_weights

FORMAT_VERSION = 1
_PREFIX = "checkpoint-"
_TORCH_GENERATOR = "torch"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What `load` restored besides the tensors."""

    folder: Path
    step: int
    state: dict[str, Any]
    config: dict[str, Any]


def save(
    root: Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """Write `root/checkpoint-<step>` atomically, then remove all but the newest `keep`."""
    folder = root / f"{_PREFIX}{step}"
    with replacing_folder(folder) as new:
        save_file(_trainable_tensors(model), new / "parameters.safetensors")
        save_file(_optimizer_tensors(model, optimizer), new / "optimizer.safetensors")
        save_file({_TORCH_GENERATOR: torch.get_rng_state()}, new / "random.safetensors")
        write_json(new / "state.json", {"step": step, "state": dict(state)})
        write_json(new / "config.json", dict(config))
        files = {
            file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
            for file in sorted(new.iterdir())
        }
        write_json(new / "manifest.json", {"format": FORMAT_VERSION, "files": files})
    for old in _folders(root)[keep:]:
        _remove(old)
    return folder


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` looks like one that `save` wrote; `verify` says whether it is whole."""
    return (folder / "manifest.json").is_file() and (folder / "parameters.safetensors").is_file()


def latest(root: Path, *, on_message: Callable[[str], None] = print) -> Path | None:
    """Newest checkpoint under `root` that is whole and undamaged; says which it skips."""
    for folder in _folders(root):
        try:
            verify(folder)
        except CheckpointError as error:
            on_message(f"skipping a damaged checkpoint: {error}")
        else:
            return folder
    return None


def verify(folder: Path) -> None:
    """Raise CheckpointError unless every file has the size and sha256 its manifest says."""
    manifest = _read_json(folder / "manifest.json")
    if manifest.get("format") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has checkpoint format {manifest.get('format')!r}; "
            f"this version reads {FORMAT_VERSION}"
        )
    for name, expected in manifest["files"].items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else 0
        if size != expected["bytes"]:
            raise CheckpointError(f"{file} has {size} bytes, {expected['bytes']} were written")
        if sha256_of(file) != expected["sha256"]:
            raise CheckpointError(f"{file} does not match its sha256 in manifest.json")


def load(
    folder: Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Mapping[str, Any],
    may_differ: Sequence[str] = (),
) -> Checkpoint:
    """Restore parameters, optimizer and random state in place; `latest` has verified `folder`.

    Raises ConfigError when the checkpoint's configuration differs from `config` in a key (dotted
    path) that is not in `may_differ`: continuing under other settings would be another run.
    """
    saved_config = read_config(folder)
    require_same_config(saved_config, config, may_differ=may_differ, where=str(folder))
    load_parameters(folder, model)
    _restore_optimizer(model, optimizer, load_file(folder / "optimizer.safetensors"))
    torch.set_rng_state(load_file(folder / "random.safetensors")[_TORCH_GENERATOR])
    saved = _read_json(folder / "state.json")
    return Checkpoint(folder=folder, step=saved["step"], state=saved["state"], config=saved_config)


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration that was given to `save`."""
    return _read_json(folder / "config.json")


@torch.no_grad()
def load_parameters(folder: Path, model: nn.Module) -> None:
    """Restore the trainable parameters alone."""
    tensors = load_file(folder / "parameters.safetensors")
    parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if parameters.keys() != tensors.keys():
        odd = sorted(parameters.keys() ^ tensors.keys())
        raise CheckpointError(
            f"the checkpoint has {len(tensors)} trainable tensors and the model {len(parameters)}; "
            f"the first that only one of them has is {odd[0]}"
        )
    for name, weight in parameters.items():
        weight.copy_(tensors[name])


def require_same_config(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], *, may_differ: Sequence[str], where: str
) -> None:
    """Raise ConfigError naming every key whose value differs, unless it is in `may_differ`."""
    before, now = _flatten(saved), _flatten(json.loads(json.dumps(wanted)))
    differing = [
        f"{key} was {json.dumps(before.get(key))}, is {json.dumps(now.get(key))}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in may_differ
    ]
    if differing:
        raise ConfigError(
            f"cannot resume {where} under other settings: {'; '.join(differing)}; "
            "restore them, or start a new run in another folder"
        )


def fingerprint_frozen(model: nn.Module) -> str:
    """Hash of the weights that checkpoints leave out, so that a run resumes on the same base."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
            digest.update(weight.detach().contiguous().view(torch.uint8).numpy().data)
    for name, quantized in quantized_weights(model):
        for part, tensor in quantized.tensors().items():
            digest.update(f"{name} {part} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def clean_up(root: Path) -> None:
    """Remove what a killed save left half-written. Only for the process that owns `root`."""
    for leftover in root.glob(f".{_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders, newest first."""
    found = [
        folder
        for folder in root.glob(f"{_PREFIX}*")
        if folder.name.removeprefix(_PREFIX).isdecimal() and folder.is_dir()
    ]
    return sorted(found, key=lambda folder: int(folder.name.removeprefix(_PREFIX)), reverse=True)


def _remove(folder: Path) -> None:
    """Rename first, so that a crash while deleting leaves nothing that looks like a checkpoint."""
    grave = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".old"))
    folder.rename(grave / folder.name)
    shutil.rmtree(grave, ignore_errors=True)


def _trainable_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: weight.detach().contiguous()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": value.detach().contiguous()
        for name, weight in model.named_parameters()
        if weight.requires_grad
        for key, value in optimizer.state.get(weight, {}).items()
    }


def _restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in tensors.items():
        name, _, field = key.rpartition("/")
        optimizer.state[parameters[name]][field] = value


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {path: value}
    leaves: dict[str, Any] = {}
    for key, inner in value.items():
        leaves |= _flatten(inner, f"{path}.{key}" if path else key)
    return leaves


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, not an object")
    return value
