"""The order in which documents are visited: a shuffle for each epoch that depends on nothing else.

The permutation of an epoch sorts the documents by a hash of (seed, epoch, index), so it is the same
on every machine and with every version of every library, and the state is two integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any


@dataclass(kw_only=True)
class DataOrder:
    """Walks through the documents, epoch after epoch. A batch never spans two epochs."""

    num_documents: int
    batch_size: int
    seed: int
    epoch: int = 0
    cursor: int = 0
    """Documents of this epoch already visited."""

    def __post_init__(self) -> None:
        self._permutation = shuffled(self.num_documents, seed=self.seed, epoch=self.epoch)

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.num_documents // self.batch_size)

    def next_batch(self) -> list[int]:
        """Indices of the next `batch_size` documents; fewer at the end of an epoch."""
        if self.cursor == self.num_documents:
            self._start(epoch=self.epoch + 1, cursor=0)
        batch = self._permutation[self.cursor : self.cursor + self.batch_size]
        self.cursor += len(batch)
        return batch

    def state(self) -> dict[str, int]:
        return {"epoch": self.epoch, "cursor": self.cursor}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._start(epoch=state["epoch"], cursor=state["cursor"])

    def _start(self, *, epoch: int, cursor: int) -> None:
        self.epoch, self.cursor = epoch, cursor
        self._permutation = shuffled(self.num_documents, seed=self.seed, epoch=epoch)


def shuffled(count: int, *, seed: int, epoch: int) -> list[int]:
    """A permutation of `range(count)`."""
    return sorted(range(count), key=lambda index: (_hash(f"{seed}/{epoch}/{index}"), index))


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()
