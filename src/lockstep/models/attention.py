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
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from lockstep.core.errors import ConfigError
from lockstep.core.model_config import ModelConfig
from lockstep.kernels import huge_pages
from lockstep.kernels.attention import (
    BLOCK,
    KVFormat,
    attention_packed,
    attention_paged,
    attention_scored,
    bytes_per_block,
    empty_pages,
    native_format,
)
from lockstep.kernels.embedding import embedding
from lockstep.kernels.split_qkv import split_qkv
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
    """Sequences laid end to end, causal within each, blind to each other. `kv_format` is the
    server's, where it keeps keys and values in fewer bits: then trainer and server agree.
    """

    def __init__(self, cu_seqlens_S1: Tensor, *, kv_format: KVFormat | None = None) -> None:
        self.cu_seqlens_S1 = cu_seqlens_S1.to(torch.int32)
        self.kv_format = kv_format
        self.max_length = int(cu_seqlens_S1.diff().max()) if len(cu_seqlens_S1) > 1 else 0

    @classmethod
    def from_lengths(
        cls, lengths: Sequence[int], *, kv_format: KVFormat | None = None
    ) -> PackedAttention:
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(starts, kv_format=kv_format)

    def positions(self) -> Tensor:
        """Position of each token within its own sequence, (T,) int64."""
        starts = self.cu_seqlens_S1[:-1].long()
        lengths = self.cu_seqlens_S1.diff().long()
        return torch.arange(int(self.cu_seqlens_S1[-1])) - starts.repeat_interleave(lengths)

    def attend(
        self, layer: int, qkv_TX: Tensor, positions_T: Tensor, rotary: RotaryTable, spec: HeadSpec
    ) -> Tensor:
        if torch.is_grad_enabled():
            q, k, v = split_qkv(qkv_TX, positions_T, *rotary.tables, **_preparation(spec))
            return self.attend_heads(q, k, v, spec)
        return attention_scored(
            qkv_TX,
            positions_T,
            *rotary.tables,
            **_preparation(spec),
            cu_seqlens_S1=self.cu_seqlens_S1,
            scale=spec.scale,
            window=spec.window or 0,
            kv_format=self.kv_format,
        )

    def attend_heads(self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spec: HeadSpec) -> Tensor:
        """`attend` from heads that are normed and rotated."""
        o_TNH = attention_packed(
            q_TNH,
            k_TKH,
            v_TKH,
            self.cu_seqlens_S1,
            scale=spec.scale,
            window=spec.window or 0,
            kv_format=self.kv_format,
        )
        return o_TNH.flatten(1)


class SharedPrefixAttention:
    """Sequences that begin alike, their common tokens present once among the T packed tokens.

    Place e of the sequences laid end to end is packed token `tokens_E[e]`. Queries, keys and values
    are copied out to the places, attended as ever, and each token's output is read at its first
    place: the bits are those of `PackedAttention` over whole sequences, while everything else in
    the model runs on T rows instead of E. Gradients of shared tokens are added up in fp32.
    """

    def __init__(
        self, tokens_E: Tensor, cu_seqlens_S1: Tensor, *, kv_format: KVFormat | None = None
    ) -> None:
        self._whole = PackedAttention(cu_seqlens_S1, kv_format=kv_format)
        self._tokens_E = tokens_E
        order = torch.arange(len(tokens_E) - 1, -1, -1)
        self._places_T = torch.empty(int(tokens_E.max()) + 1, dtype=torch.int64)
        self._places_T[tokens_E[order]] = order  # the last write, hence the first place, stays
        self.max_length = self._whole.max_length

    def attend(
        self, layer: int, qkv_TX: Tensor, positions_T: Tensor, rotary: RotaryTable, spec: HeadSpec
    ) -> Tensor:
        heads = split_qkv(qkv_TX, positions_T, *rotary.tables, **_preparation(spec))
        q, k, v = (_rows(x, self._tokens_E) for x in heads)
        return _rows(self._whole.attend_heads(q, k, v, spec), self._places_T)


def _preparation(spec: HeadSpec) -> _Preparation:
    return {
        "q_norm_H": spec.q_norm,
        "k_norm_H": spec.k_norm,
        "eps": spec.eps,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
    }


class _Preparation(TypedDict):
    """What kernels are told of heads that are not normed and rotated yet."""

    q_norm_H: Tensor | None
    k_norm_H: Tensor | None
    eps: float
    num_heads: int
    num_kv_heads: int


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] by the embedding kernel, whose gradient adds rows in order and in fp32."""
    return embedding(x.flatten(1), index, dtype=x.dtype).view(-1, *x.shape[1:])


class KVCache:
    """Pages of keys and values, `num_blocks` of 16 tokens for each layer; who owns which is the
    scheduler's affair.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        dtype: torch.dtype,
        *,
        format: KVFormat | None = None,
        block_size: int = BLOCK,
    ) -> None:
        assert block_size == BLOCK, f"pages hold {BLOCK} tokens, not {block_size}"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.format = kv_format_for(dtype, format)
        # Not initialised: no kernel reads a place that was not written (tests fill them with NaN).
        self.pages = [
            empty_pages(
                num_blocks, config.num_kv_heads, config.head_dim, self.format, huge_pages.empty
            )
            for _ in range(config.num_layers)
        ]

    @staticmethod
    def bytes_per_block(
        config: ModelConfig, dtype: torch.dtype, *, format: KVFormat | None = None
    ) -> int:
        """Memory of one block over all layers, for sizing the cache."""
        chosen = kv_format_for(dtype, format)
        return config.num_layers * bytes_per_block(config.num_kv_heads, config.head_dim, chosen)


def kv_format_for(dtype: torch.dtype, format: KVFormat | None) -> KVFormat:
    """The format itself, or that which keeps this compute dtype; ConfigError where it is wider."""
    if format == "fp32" and dtype == torch.bfloat16:
        raise ConfigError(
            "the model computes in bf16, so a KV cache of fp32 gains nothing; use bf16, int8 or fp8"
        )
    return format or native_format(dtype)


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
        self.block_tables_SB = block_tables_SB.to(torch.int32)
        assert block_tables_SB.stride(1) == 1, "a sequence's blocks lie side by side"
        self.query_starts_S1 = query_starts_S1.to(torch.int32)
        self.context_lens_S = context_lens_S.to(torch.int32)
        self.max_length = max_length

    def attend(
        self, layer: int, qkv_TX: Tensor, positions_T: Tensor, rotary: RotaryTable, spec: HeadSpec
    ) -> Tensor:
        return attention_paged(
            qkv_TX,
            positions_T,
            *rotary.tables,
            self.cache.pages[layer],
            **_preparation(spec),
            block_tables_SB=self.block_tables_SB,
            query_starts_S1=self.query_starts_S1,
            context_lens_S=self.context_lens_S,
            scale=spec.scale,
            window=spec.window or 0,
        )
