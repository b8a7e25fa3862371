"""Packed weights on disk, beside the checkpoint they were made from, for a server to start at once.

    magic, header's length and CRC | header (JSON): identity, tensors | to 4 KiB | data

A file serves only the very inputs it was made from: its identity holds the size and modification
time of every file of the checkpoint, the precision, how weights are held, and the hash of the
native library, whose layouts these are (they are the same for every instruction set). Anything else
is stale and is written anew. A file appears under its name when it is whole (`core.files`); the
header's CRC, the file's size and a sum for each tensor, checked while it is read, tell of damage
later on.

The data is read into memory on huge pages rather than mapped: 300 MB cost 0.07 s, of which mapping
would save 0.02, and weights on the page cache's 4 KiB pages decode at two thirds of the speed.
Why: docs/decisions/009.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.core.files import replacing, sha256_of
from lockstep.kernels import huge_pages, native_library
from lockstep.kernels.linear import PACKED_FIELDS, PackCache, QuantizedWeight
from lockstep.models.fetch import cache_folder
from lockstep.models.layers import Linear, quantized_weights, set_weight
from lockstep.models.llama import Llama
from lockstep.models.resolve import ModelSource

logger = logging.getLogger("lockstep.models")

FORMAT_VERSION = 3
_MAGIC = b"LSPACKED"
_PREFIX_BYTES = len(_MAGIC) + 8 + 4
_PAGE_BYTES = 4096
_TENSOR_ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class PackedWeights:
    """What a model needs to serve."""

    tensors: Mapping[str, Tensor]
    """Parameters by name, and the fields of packs."""
    quantized: Mapping[str, Mapping[str, Any]]
    """Descriptions of quantised weights, of modules and of packs."""

    @classmethod
    def of(cls, model: Llama) -> PackedWeights:
        """Those of a model that is packed."""
        tensors = {name: parameter.detach() for name, parameter in _kept_parameters(model).items()}
        quantized = {name: weight.describe() for name, weight in quantized_weights(model)}
        for name, packs in _packs(model).items():
            tensors |= {f"{name}.{field}": tensor for field, tensor in packs.parts().items()}
            if packs.quantized is not None:
                quantized[name] = packs.quantized.describe()
        return cls(tensors=tensors, quantized=quantized)

    def give_to(self, model: Llama) -> None:
        """Fill a model on the meta device to serve from packed weights alone.

        The row-major weights of its projections stay on the meta device: training it or merging an
        adapter into it fails.
        """
        for name, module in model.named_modules():
            if (description := self.quantized.get(f"{name}.weight")) is not None:
                set_weight(module, QuantizedWeight.described(description))  # type: ignore[arg-type]
        for name, parameter in _kept_parameters(model).items():
            owner = model.get_submodule(name.rpartition(".")[0])
            value = nn.Parameter(self.tensors[name].view(parameter.shape), requires_grad=False)
            owner.register_parameter(name.rpartition(".")[2], value)
        model.requires_grad_(False)
        for name, packs in _packs(model).items():
            parts = {field: self.tensors.get(f"{name}.{field}") for field in PACKED_FIELDS}
            if parts["data"] is not None:
                whole = self.quantized.get(name)
                quantized = None if whole is None else QuantizedWeight.described(whole)
                packs.adopt(parts, model.compute_dtype, quantized)


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """Where the packed weights of a checkpoint are kept, and what they must be made from."""

    path: Path
    identity: Mapping[str, Any]

    @classmethod
    def of(cls, source: ModelSource, precision: str, weights: str) -> PackedFile:
        """Beside the checkpoint where that can be written, else in the cache."""
        files = [source.path] if source.format == "gguf" else sorted(source.path.iterdir())
        identity = {
            "format": FORMAT_VERSION,
            "library": sha256_of(native_library.library_path()),
            "precision": precision,
            "weights": weights,
            "files": [
                [file.name, stat.st_size, stat.st_mtime_ns]
                for file in files
                if not file.name.startswith(".")
                for stat in [file.stat()]
            ],
        }
        name = f".{source.path.name}.packed-{precision}-{weights}"
        folder = source.path if source.format == "hf" else source.path.parent
        if not os.access(folder, os.W_OK):
            place = zlib.crc32(str(source.path.resolve()).encode())
            folder, name = cache_folder() / "packed", f"{place:08x}{name}"
        return cls(path=folder / name, identity=identity)

    def read(self) -> PackedWeights | None:
        """None where there is no file made from the same inputs."""
        try:
            with self.path.open("rb", buffering=0) as stream:
                return _read(stream.fileno(), self.identity)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s is not used (%s); weights are packed anew", self.path, error)
            return None

    def write(self, weights: PackedWeights) -> None:
        """Keep them for the next start; a warning where the folder is full or read-only."""
        try:
            with replacing(self.path) as temporary, temporary.open("wb") as stream:
                _write(stream.fileno(), self.identity, weights)
        except OSError as error:
            logger.warning("packed weights are not kept in %s (%s)", self.path, error)


def _packs(model: Llama) -> dict[str, PackCache]:
    """By name, those of single projections and of groups."""
    return {
        f"{name}.packs": module.packs
        for name, module in model.named_modules()
        if isinstance(getattr(module, "packs", None), PackCache)
    }


def _kept_parameters(model: Llama) -> dict[str, nn.Parameter]:
    """Parameters that are used as they are: norms, biases, the token table."""
    linear_weights = {id(m.weight) for m in model.modules() if isinstance(m, Linear)}
    return {n: p for n, p in model.named_parameters() if id(p) not in linear_weights}


def _write(fd: int, identity: Mapping[str, Any], weights: PackedWeights) -> None:
    tensors, table, end = weights.tensors, {}, 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        table[name] = [dtype, end, tensor.nbytes, _sum(_bytes_of(tensor))]
        end += -(-tensor.nbytes // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT
    header = {
        "identity": identity,
        "tensors": table,
        "quantized": weights.quantized,
        "num_bytes": end,
    }
    encoded = json.dumps(header).encode()
    prefix = _MAGIC + len(encoded).to_bytes(8, "little") + zlib.crc32(encoded).to_bytes(4, "little")
    start = _data_start(len(encoded))
    os.ftruncate(fd, start + end)
    os.pwrite(fd, prefix + encoded, 0)
    for (_, offset, _, _), tensor in zip(table.values(), tensors.values(), strict=True):
        _transfer(os.pwrite, fd, _bytes_of(tensor), start + offset)


def _read(fd: int, identity: Mapping[str, Any]) -> PackedWeights | None:
    """None where the file was made from something else; ValueError where it is damaged."""
    prefix = os.pread(fd, _PREFIX_BYTES, 0)
    if len(prefix) < _PREFIX_BYTES or not prefix.startswith(_MAGIC):
        raise ValueError("it is no file of packed weights")
    length = int.from_bytes(prefix[len(_MAGIC) : -4], "little")
    if length > os.fstat(fd).st_size:
        raise ValueError("its header is cut off")
    encoded = os.pread(fd, length, _PREFIX_BYTES)
    if zlib.crc32(encoded) != int.from_bytes(prefix[-4:], "little"):
        raise ValueError("its header is damaged")
    header = json.loads(encoded)
    if header["identity"] != json.loads(json.dumps(identity)):
        return None
    start, num_bytes = _data_start(length), header["num_bytes"]
    if os.fstat(fd).st_size != start + num_bytes:
        raise ValueError(f"it has {os.fstat(fd).st_size} bytes instead of {start + num_bytes}")
    data = huge_pages.empty((num_bytes,), torch.uint8)
    _transfer(lambda file, piece, offset: os.preadv(file, [piece], offset), fd, data, start)
    tensors = {}
    for name, (dtype, offset, size, wanted) in header["tensors"].items():
        piece = data[offset : offset + size]
        if _sum(piece) != wanted:
            raise ValueError(f"its data is damaged in {name}")
        tensors[name] = piece.view(getattr(torch, dtype))
    return PackedWeights(tensors=tensors, quantized=header["quantized"])


def _transfer(move: Any, fd: int, data: Tensor, start: int) -> None:
    """All of `data` from or to `start` in the file; one call moves at most 2 GiB."""
    view = memoryview(data.numpy())
    done = 0
    while done < len(view):
        moved = move(fd, view[done:], start + done)
        if moved == 0:
            raise ValueError("it ends too early")
        done += moved


def _data_start(header_bytes: int) -> int:
    return -(-(_PREFIX_BYTES + header_bytes) // _PAGE_BYTES) * _PAGE_BYTES


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _sum(data: Tensor) -> int:
    """The wrapping sum of 64-bit words, and of the bytes of the last one: 15 GB/s."""
    whole = len(data) // 8 * 8
    words = int(data[:whole].view(torch.int64).sum())
    return words ^ int.from_bytes(data[whole:].numpy().tobytes(), "little")
