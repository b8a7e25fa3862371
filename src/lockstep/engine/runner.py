"""Computes a scheduler's step: its chunks packed into one row of tokens, through the model, to
drawn tokens.

The whole of it, from token ids to drawn ids and their logprobs, is one function of static inputs
and a shape, so it can be captured (`lockstep.engine.programs`) and replayed in one native call; run
eagerly it gives the same bits. Weights are the model's own parameters and are only read, so a
trainer in the same process may own them. The KV cache lives here. Legend: T packed tokens, D
hidden, R rows that are drawn from, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.engine.programs import StepPrograms
from lockstep.engine.step_inputs import RowSampling, StepInputs, StepLimits, StepShape
from lockstep.engine.step_shapes import LOGITS_ROWS, num_groups
from lockstep.kernels import configuration, dispatch, missing_reason
from lockstep.kernels.attention import KVFormat
from lockstep.kernels.cross_entropy import logprobs_of
from lockstep.kernels.embedding import embedding
from lockstep.kernels.sampling import sample
from lockstep.models.attention import KVCache, PagedAttention
from lockstep.models.fingerprint import ModelFingerprint
from lockstep.models.llama import Llama
from lockstep.schedule import Step

CaptureMode = Literal["auto", "off"]


class DrawnRows(NamedTuple):
    """At most LOGITS_ROWS drawn rows."""

    token_ids_R: Tensor
    sampling_logprobs_R: Tensor
    """NaN where the logits are not numbers, and then nothing was drawn."""
    logprobs_R: Tensor
    logits_RV: Tensor | None
    """Where the step keeps them."""


class StepOutputs(NamedTuple):
    """What a step computed; holds until the next step is run."""

    hidden_TD: Tensor | None
    """Of every token, where the step keeps them."""
    groups: tuple[DrawnRows, ...]
    """All drawn rows, in order."""

    def logits_of(self, rows: Sequence[int]) -> Tensor:
        """Logits of some drawn rows, copied; the step must have kept them."""
        parts = []
        for number, group in enumerate(self.groups):
            assert group.logits_RV is not None
            begin = number * LOGITS_ROWS
            within = [row - begin for row in rows if begin <= row < begin + LOGITS_ROWS]
            parts.append(group.logits_RV[torch.tensor(within, dtype=torch.int64)])
        return torch.cat(parts)

    def narrowed(self, shape: StepShape) -> StepOutputs:
        """The outputs of a smaller step, as the first rows of these."""
        groups = [
            DrawnRows(*(None if rows is None else rows[: shape.num_rows - begin] for rows in group))
            for begin, group in zip(range(0, shape.num_rows, LOGITS_ROWS), self.groups, strict=True)
        ]
        hidden_TD = None if self.hidden_TD is None else self.hidden_TD[: shape.num_tokens]
        return StepOutputs(hidden_TD, tuple(groups))


class ModelRunner:
    """A model and its KV cache. Not `inference_mode`: packed weights and rope tables that the model
    caches during a call must remain usable in a trainer's backward pass.
    """

    def __init__(
        self,
        model: Llama,
        *,
        num_blocks: int,
        limits: StepLimits,
        capture: CaptureMode = "auto",
        kv_format: KVFormat | None = None,
    ) -> None:
        self.model = model
        self.cache = KVCache(model.config, num_blocks, model.compute_dtype, format=kv_format)
        self.programs = StepPrograms(self._compute, StepOutputs.narrowed, limits)
        self._inputs = StepInputs(limits)
        self._captures = capture == "auto" and missing_reason() is None
        self._fingerprint = ModelFingerprint(model)
        self._configuration = configuration()

    @torch.no_grad()
    def run(
        self,
        step: Step,
        sampling: Sequence[RowSampling] = (),
        *,
        keeps_logits: bool = False,
        keeps_hidden: bool = False,
    ) -> StepOutputs:
        """Compute a step and draw a token for each chunk that samples."""
        shape = self._inputs.write(
            step, sampling, keeps_logits=keeps_logits, keeps_hidden=keeps_hidden
        )
        self.model.rotary.reserve(self._inputs.last_end)
        if not self._captures or dispatch.is_reference_forced():
            return self._compute(shape)
        if self._fingerprint.has_changed() or self._configuration != configuration():
            self._configuration = configuration()
            self.programs.clear()
        return self.programs.run(shape)

    @torch.no_grad()
    def logits(self, hidden_RD: Tensor) -> Iterator[Tensor]:
        """fp32 logits of some rows, at most LOGITS_ROWS of them at a time."""
        for start in range(0, len(hidden_RD), LOGITS_ROWS):
            yield self.model.logits(hidden_RD[start : start + LOGITS_ROWS])

    @torch.no_grad()
    def token_logprobs(self, hidden_RD: Tensor, targets_R: Tensor) -> Tensor:
        return self.model.token_logprobs(hidden_RD, targets_R)

    def _compute(self, shape: StepShape) -> StepOutputs:
        """The step that the inputs describe. Captured: it may call kernels only."""
        num_tokens, num_seqs, num_rows = shape.num_tokens, shape.num_seqs, shape.num_rows
        inputs = self._inputs
        attention = PagedAttention(
            self.cache,
            block_tables_SB=inputs.block_tables_SB[:num_seqs],
            query_starts_S1=inputs.query_starts_S1[: num_seqs + 1],
            context_lens_S=inputs.context_lens_S[:num_seqs],
            max_length=self.model.rotary.num_positions,
        )
        rows_R = None if shape.draws_all or shape.keeps_hidden else inputs.rows_R[:num_rows]
        hidden: Tensor = self.model(
            inputs.tokens_T[:num_tokens],
            inputs.positions_T[:num_tokens],
            attention,
            rows_R=rows_R,
        )
        hidden_RD = hidden
        if shape.keeps_hidden and not shape.draws_all:
            hidden_RD = embedding(hidden, inputs.rows_R[:num_rows], dtype=hidden.dtype)
        groups = []
        for number in range(num_groups(shape)):
            begin = number * LOGITS_ROWS
            rows = slice(begin, min(begin + LOGITS_ROWS, num_rows))
            groups.append(self._draw(hidden_RD[rows], rows, keeps_logits=shape.keeps_logits))
        return StepOutputs(hidden if shape.keeps_hidden else None, tuple(groups))

    def _draw(self, hidden_RD: Tensor, rows: slice, *, keeps_logits: bool) -> DrawnRows:
        inputs = self._inputs
        logits_RV = self.model.logits(hidden_RD)
        drawn = sample(
            logits_RV,
            temperature_S=inputs.temperature_R[rows],
            top_k_S=inputs.top_k_R[rows],
            top_p_S=inputs.top_p_R[rows],
            min_p_S=inputs.min_p_R[rows],
            seed_S=inputs.seed_R[rows],
            position_S=inputs.draw_positions_R[rows],
        )
        return DrawnRows(
            drawn.token_ids_S,
            drawn.sampling_logprobs_S,
            logprobs_of(logits_RV, drawn.token_ids_S, inputs.one_R[rows]),
            logits_RV if keeps_logits else None,
        )
