"""Documents laid end to end into micro-batches, with no document seeing its neighbours.

Each micro-batch holds at most `max_tokens` tokens; `cu_seqlens_S1` tells attention where
documents begin and positions restart at 0, so a packed document has the logprobs and gradients it
has alone. Where documents of a micro-batch begin with the same tokens (a system prompt, the prompt
of a group of rollouts), those are computed once, with the same bits. Documents are placed by
best-fit decreasing: longest first, each into the fullest micro-batch that still has room. The
result depends on the documents only. Does not shuffle (see `order`) and does not shorten documents
(see `dataset`).

Shapes: T packed tokens, S documents, R tokens that carry loss, E tokens of the documents (more than
T where prefixes are shared).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lockstep.core.errors import DataError
from lockstep.kernels.attention import KVFormat
from lockstep.models.attention import AttentionContext, PackedAttention, SharedPrefixAttention


@dataclass(frozen=True, kw_only=True)
class Document:
    """One token sequence. Entry i of every array belongs to token i; nothing predicts token 0."""

    token_ids: Sequence[int] | np.ndarray
    loss_weights: Sequence[float] | np.ndarray
    """Weight of each token's loss; 0 for context."""
    columns: Mapping[str, Sequence[float] | np.ndarray] = field(default_factory=dict)
    """Further numbers a loss needs for each token, such as advantages."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        return int(np.count_nonzero(np.asarray(self.loss_weights)[1:]))


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass. The R rows are those with a non-zero loss weight, in order."""

    tokens_T: Tensor
    positions_T: Tensor
    cu_seqlens_S1: Tensor
    """Where each document begins and ends among the E."""
    shared_E: Tensor | None
    """Row of T that each document token is; None where it is the token's own place (E = T)."""
    rows_R: Tensor
    """Row of `hidden_TD` that predicts each loss token: one before the token itself."""
    targets_R: Tensor
    weights_R: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """The documents' columns at the loss tokens, R values each."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the documents, E; `tokens_T` may hold fewer."""
        return int(self.cu_seqlens_S1[-1])

    def attention(self, *, kv_format: KVFormat | None = None) -> AttentionContext:
        """The context that makes each document see itself alone."""
        if self.shared_E is None:
            return PackedAttention(self.cu_seqlens_S1, kv_format=kv_format)
        return SharedPrefixAttention(self.shared_E, self.cu_seqlens_S1, kv_format=kv_format)

    @property
    def num_loss_tokens(self) -> int:
        return self.targets_R.numel()


def pack(documents: Sequence[Document], *, max_tokens: int) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` tokens that hold every document once."""
    bins = best_fit([len(document) for document in documents], capacity=max_tokens)
    return [_lay_end_to_end([documents[index] for index in indices]) for indices in bins]


def total_weight(micro_batches: Iterable[MicroBatch]) -> float:
    """Sum of all loss weights: what a token mean over the global batch is divided by."""
    return float(sum(batch.weights_R.sum(dtype=torch.float64).item() for batch in micro_batches))


def best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Indices into `lengths`, grouped so that no group's sum exceeds `capacity`."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > capacity:
            raise DataError(
                f"a document has {length} tokens and a micro-batch holds {capacity}; raise "
                f"--micro-batch-tokens to at least {length} or lower --max-length to {capacity}"
            )
        place = bisect_left(free, (length, -1))
        if place == len(free):
            bins.append([index])
            insort(free, (capacity - length, len(bins) - 1))
        else:
            room, chosen = free.pop(place)
            bins[chosen].append(index)
            insort(free, (room - length, chosen))
    return [sorted(indices) for indices in bins]


def _lay_end_to_end(documents: Sequence[Document]) -> MicroBatch:
    lengths = np.array([len(document) for document in documents])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    each = [np.asarray(document.token_ids, dtype=np.int64) for document in documents]
    tokens_E = np.concatenate(each)
    positions_E = np.arange(len(tokens_E)) - np.repeat(starts[:-1], lengths)
    weights = np.concatenate(
        [np.asarray(document.loss_weights, dtype=np.float32) for document in documents]
    )
    weights[starts[:-1]] = 0.0  # nothing predicts a first token
    loss_tokens = np.flatnonzero(weights)
    columns = {
        name: np.concatenate(
            [np.asarray(document.columns[name], dtype=np.float32) for document in documents]
        )
        for name in documents[0].columns
    }
    rows_E = shared_rows(each)
    first_E = np.unique(rows_E, return_index=True)[1]  # a place of each row
    is_shared = len(first_E) < len(tokens_E)
    return MicroBatch(
        tokens_T=torch.from_numpy(tokens_E[first_E]),
        positions_T=torch.from_numpy(positions_E[first_E]),
        cu_seqlens_S1=torch.from_numpy(starts.astype(np.int32)),
        shared_E=torch.from_numpy(rows_E) if is_shared else None,
        rows_R=torch.from_numpy(rows_E[loss_tokens - 1]),
        targets_R=torch.from_numpy(tokens_E[loss_tokens]),
        weights_R=torch.from_numpy(weights[loss_tokens]),
        columns={name: torch.from_numpy(values[loss_tokens]) for name, values in columns.items()},
    )


def shared_rows(documents: Sequence[np.ndarray]) -> np.ndarray:
    """Row of each token of the documents laid end to end, equal prefixes on the same rows.

    In sorted order the longest prefix a document shares with any before it is the one it shares
    with its neighbour, so one pass builds the whole prefix tree. Each row stands for one (prefix,
    token). Where that would spare less than an eighth of the tokens, nothing is shared: copying
    queries, keys and values out to their places is not free.
    """
    order = sorted(range(len(documents)), key=lambda index: documents[index].tolist())
    rows: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(documents)
    num_rows = 0
    previous = None
    for index in order:
        common = 0 if previous is None else _common_length(documents[previous], documents[index])
        num_new = len(documents[index]) - common
        inherited = rows[previous][:common] if previous is not None else rows[index]
        rows[index] = np.concatenate([inherited, np.arange(num_rows, num_rows + num_new)])
        num_rows += num_new
        previous = index
    total = sum(len(document) for document in documents)
    return np.arange(total) if num_rows > total * 7 // 8 else np.concatenate(rows)


def _common_length(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
