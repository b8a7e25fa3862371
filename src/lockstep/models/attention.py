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
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from lockstep.core.model_config import ModelConfig
from lockstep.kernels import huge_pages
from lockstep.kernels.attention import BLOCK, attention_packed, attention_paged, padded_head_dim
from lockstep.kernels.embedding import embedding


class AttentionContext(Protocol):
    """What a layer asks of its context."""

    max_length: int
    """No position in this call reaches it; the model sizes its rope table by it."""

    def attend(
        self,
        layer: int,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Causal attention output (T, N, H); `window` None sees all earlier keys."""
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
        self,
        layer: int,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        return attention_packed(
            q_TNH, k_TKH, v_TKH, self.cu_seqlens_S1, scale=scale, window=window or 0
        )


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
        self,
        layer: int,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        q, k, v = (_rows(x, self._tokens_E) for x in (q_TNH, k_TKH, v_TKH))
        o_ENH = self._whole.attend(layer, q, k, v, scale=scale, window=window)
        return _rows(o_ENH, self._places_T)


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
        self,
        layer: int,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        return attention_paged(
            q_TNH,
            k_TKH,
            v_TKH,
            self.cache.k_pages[layer],
            self.cache.v_pages[layer],
            block_tables_SB=self.block_tables_SB,
            query_starts_S1=self.query_starts_S1,
            context_lens_S=self.context_lens_S,
            scale=scale,
            window=window or 0,
        )
