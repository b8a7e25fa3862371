"""Writing safetensors in shards, tensor by tensor, so that at most one shard is in memory."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from lockstep.core.files import replacing, write_json
from lockstep.models.hf_folder import INDEX_NAME, SINGLE_NAME


class ShardWriter:
    """Collects tensors into files of at most `max_bytes`, unless one tensor is larger. `finish`
    names them.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._shard: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._placed: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._shard and self._held_bytes + tensor.nbytes > self._max_bytes:
            self._flush()
        self._shard[name] = tensor.contiguous()
        self._held_bytes += tensor.nbytes

    def finish(self) -> None:
        """One file, or numbered files with an index. Names need the count, so shards are renamed
        last.
        """
        self._flush()
        count = len(self._placed)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            names = [SINGLE_NAME]
        for number, name in enumerate(names):
            self._partial(number).rename(self._folder / name)
        if count > 1:
            pairs = zip(names, self._placed, strict=True)
            weight_map = {tensor: name for name, held in pairs for tensor in held}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            write_json(self._folder / INDEX_NAME, index)

    def _flush(self) -> None:
        with replacing(self._partial(len(self._placed))) as temporary:
            save_file(self._shard, temporary, metadata={"format": "pt"})
        self._placed.append(list(self._shard))
        self._total_bytes += self._held_bytes
        self._shard, self._held_bytes = {}, 0

    def _partial(self, number: int) -> Path:
        return self._folder / f"shard-{number}.partial"
