"""Computes a scheduler's step: packs its chunks into one row of tokens and calls the model.

Weights are the model's own parameters and are only read, so a trainer in the same process may own
them. The KV cache lives here. Legend: T packed tokens, D hidden, R rows of which something is
wanted, V vocabulary, S sequences, B blocks a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from lockstep.models.attention import KVCache, PagedAttention
from lockstep.models.llama import Llama
from lockstep.schedule import Chunk, Step

LOGITS_ROWS = 64
"""Rows of logits that exist at one time: 64 x 150,000 x 4 bytes is 38 MB."""


class ModelRunner:
    """A model and its KV cache. Not `inference_mode`: packed weights and rope tables that the model
    caches during a call must remain usable in a trainer's backward pass.
    """

    def __init__(self, model: Llama, *, num_blocks: int) -> None:
        self.model = model
        self.cache = KVCache(model.config, num_blocks, model.compute_dtype)

    @torch.no_grad()
    def run(self, step: Step) -> Tensor:
        """Hidden states (T, D) of the step's tokens, chunk after chunk."""
        chunks = step.chunks
        tokens_T = torch.tensor([token for chunk in chunks for token in chunk.token_ids])
        positions_T = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        hidden_TD: Tensor = self.model(tokens_T, positions_T, self._attention(chunks))
        return hidden_TD

    @torch.no_grad()
    def logits(self, hidden_RD: Tensor) -> Iterator[Tensor]:
        """fp32 logits of some rows, at most LOGITS_ROWS of them at a time."""
        for start in range(0, len(hidden_RD), LOGITS_ROWS):
            yield self.model.logits(hidden_RD[start : start + LOGITS_ROWS])

    @torch.no_grad()
    def token_logprobs(self, hidden_RD: Tensor, targets_R: Tensor) -> Tensor:
        return self.model.token_logprobs(hidden_RD, targets_R)

    def _attention(self, chunks: Sequence[Chunk]) -> PagedAttention:
        width = max(len(chunk.block_table) for chunk in chunks)
        tables = [[*chunk.block_table, *[0] * (width - len(chunk.block_table))] for chunk in chunks]
        starts = [0, *accumulate(len(chunk.token_ids) for chunk in chunks)]
        return PagedAttention(
            self.cache,
            block_tables_SB=torch.tensor(tables, dtype=torch.int32),
            query_starts_S1=torch.tensor(starts, dtype=torch.int32),
            context_lens_S=torch.tensor([chunk.start for chunk in chunks], dtype=torch.int32),
            max_length=max(chunk.end for chunk in chunks),
        )
