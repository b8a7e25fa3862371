"""How a model's layers reach keys and values: an explicit context given to each forward call, never
a global.

`PackedAttention` is for training and scoring: whole sequences laid end to end.
`SharedPrefixAttention` is the same where sequences begin alike and their common tokens are computed
once. `PagedAttention` is for serving: chunks of sequences whose earlier tokens lie in the pages of
a `KVCache`. All run one kernel, so they agree bit for bit. Legend: T tokens, N query heads, K
key/value heads, H head dim, S sequences, B blocks a sequence, E places in the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from lockstep.core.model_config import ModelConfig
from lockstep.kernels import huge_pages
from lockstep.kernels.attention import BLOCK, attention_packed, attention_paged, padded_head_dim
from lockstep.kernels.embedding import embedding
from lockstep.kernels.rms_norm import rms_norm
from lockstep.models.layers import RotaryTable


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """The heads of one attention layer, and what is done to them before they meet."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    """Keys a query sees, itself included; None: all earlier ones."""
    q_norm: Tensor | None
    """Weight (H,) of the RMS norm of each query head, if the architecture has one."""
    k_norm: Tensor | None
    eps: float
    """Of both norms."""


class AttentionContext(Protocol):
    """What a layer asks of its context."""

    max_length: int
    """No position in this call reaches it; the model sizes its rope table by it."""

    def attend(
        self, layer: int, qkv_TX: Tensor, positions_T: Tensor, rotary: RotaryTable, spec: HeadSpec
    ) -> Tensor:
        """Causal attention output (T, N * H) of one layer. Its q, k and v heads lie side by side in
        qkv_TX, (T, (N + 2K) * H), before q/k norm and rope.
        """
        ...


class PackedAttention:
    """Sequences laid end to end, causal within each, blind to each other."""

    def __init__(self, cu_seqlens_S1: Tensor) -> None:
        self.cu_seqlens_S1 = cu_seqlens_S1.to(torch.int32)
        self.max_length = int(cu_seqlens_S1.diff().max()) if len(cu_seqlens_S1) > 1 else 0

    @classmethod
    def from_lengths(cls, lengths: Sequence[int]) -> PackedAttention:
        return cls(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))

    def positions(self) -> Tensor:
        """Position of each token within its own sequence, (T,) int64."""
        starts = self.cu_seqlens_S1[:-1].long()
        lengths = self.cu_seqlens_S1.diff().long()
        return torch.arange(int(self.cu_seqlens_S1[-1])) - starts.repeat_interleave(lengths)

    def attend(
        self, layer: int, qkv_TX: Tensor, positions_T: Tensor, rotary: RotaryTable, spec: HeadSpec
    ) -> Tensor:
        return self._attend_heads(_split(qkv_TX, positions_T, rotary, spec), spec).flatten(1)

    def _attend_heads(self, qkv: tuple[Tensor, Tensor, Tensor], spec: HeadSpec) -> Tensor:
        return attention_packed(*qkv, self.cu_seqlens_S1, scale=spec.scale, window=spec.window or 0)


class SharedPrefixAttention:
    """Sequences that begin alike, their common tokens present once among the T packed tokens.

    Place e of the sequences laid end to end is packed token `tokens_E[e]`. Queries, keys and values
    are copied out to the places, attended as ever, and each token's output is read at its first
    place: the bits are those of `PackedAttention` over whole sequences, while everything else in
    the model runs on T rows instead of E. Gradients of shared tokens are added up in fp32.
    """

    def __init__(self, tokens_E: Tensor, cu_seqlens_S1: Tensor) -> None:
        self._whole = PackedAttention(cu_seqlens_S1)
        self._tokens_E = tokens_E
        order = torch.arange(len(tokens_E) - 1, -1, -1)
        self._places_T = torch.empty(int(tokens_E.max()) + 1, dtype=torch.int64)
        self._places_T[tokens_E[order]] = order  # the last write, hence the first place, stays
        self.max_length = self._whole.max_length

    def attend(
        self, layer: int, qkv_TX: Tensor, positions_T: Tensor, rotary: RotaryTable, spec: HeadSpec
    ) -> Tensor:
        heads = _split(qkv_TX, positions_T, rotary, spec)
        q, k, v = (_rows(x, self._tokens_E) for x in heads)
        o_ENH = self._whole._attend_heads((q, k, v), spec)
        return _rows(o_ENH, self._places_T).flatten(1)


def _split(
    qkv_TX: Tensor, positions_T: Tensor, rotary: RotaryTable, spec: HeadSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """q (T, N, H) and k (T, K, H), normed and rotated, and v (T, K, H)."""
    heads = qkv_TX.unflatten(-1, (-1, spec.head_dim))
    q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    if spec.q_norm is not None and spec.k_norm is not None:
        q, k = rms_norm(q, spec.q_norm, spec.eps), rms_norm(k, spec.k_norm, spec.eps)
    return rotary.apply(q, positions_T), rotary.apply(k, positions_T), v


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] by the embedding kernel, whose gradient adds rows in order and in fp32."""
    return embedding(x.flatten(1), index, dtype=x.dtype).view(-1, *x.shape[1:])


class KVCache:
    """Pages of keys and values, `num_blocks` of 16 tokens for each layer; who owns which is the
    scheduler's affair.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, dtype: torch.dtype, *, block_size: int = BLOCK
    ) -> None:
        assert block_size == BLOCK, f"pages hold {BLOCK} tokens, not {block_size}"
        heads, dim = config.num_kv_heads, config.head_dim
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Not initialised: no kernel reads a place that was not written (tests fill them with NaN).
        self.k_pages = [
            huge_pages.empty((num_blocks, heads, dim, BLOCK), dtype)
            for _ in range(config.num_layers)
        ]
        self.v_pages = [
            huge_pages.empty((num_blocks, heads, BLOCK, padded_head_dim(dim)), dtype)
            for _ in range(config.num_layers)
        ]

    @staticmethod
    def bytes_per_block(config: ModelConfig, dtype: torch.dtype) -> int:
        """Memory of one block over all layers, for sizing the cache."""
        width = config.head_dim + padded_head_dim(config.head_dim)
        return config.num_layers * config.num_kv_heads * width * BLOCK * dtype.itemsize


class PagedAttention:
    """Chunks of S sequences: their keys and values are written to pages, then attended with all
    that came before.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        block_tables_SB: Tensor,
        query_starts_S1: Tensor,
        context_lens_S: Tensor,
        max_length: int,
    ) -> None:
        self.cache = cache
        self.block_tables_SB = block_tables_SB.to(torch.int32).contiguous()
        self.query_starts_S1 = query_starts_S1.to(torch.int32)
        self.context_lens_S = context_lens_S.to(torch.int32)
        self.max_length = max_length

    def attend(
        self, layer: int, qkv_TX: Tensor, positions_T: Tensor, rotary: RotaryTable, spec: HeadSpec
    ) -> Tensor:
        return attention_paged(
            *_split(qkv_TX, positions_T, rotary, spec),
            self.cache.k_pages[layer],
            self.cache.v_pages[layer],
            block_tables_SB=self.block_tables_SB,
            query_starts_S1=self.query_starts_S1,
            context_lens_S=self.context_lens_S,
            scale=spec.scale,
            window=spec.window or 0,
        ).flatten(1)
