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
from lockstep.kernels import configuration, dispatch, missing_reason
from lockstep.kernels.cross_entropy import logprobs_of
from lockstep.kernels.embedding import embedding
from lockstep.kernels.sampling import sample
from lockstep.models.attention import KVCache, PagedAttention
from lockstep.models.fingerprint import ModelFingerprint
from lockstep.models.llama import Llama
from lockstep.schedule import Step

LOGITS_ROWS = 64
"""Rows of logits that exist at one time, unless kept: 64 x 150,000 x 4 bytes is 38 MB."""

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

    hidden_TD: Tensor
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
    ) -> None:
        self.model = model
        self.cache = KVCache(model.config, num_blocks, model.compute_dtype)
        self.programs: StepPrograms[StepShape, StepOutputs] = StepPrograms(self._compute)
        self._inputs = StepInputs(limits)
        self._captures = capture == "auto" and missing_reason() is None
        self._fingerprint = ModelFingerprint(model)
        self._configuration = configuration()

    @torch.no_grad()
    def run(
        self, step: Step, sampling: Sequence[RowSampling] = (), *, keeps_logits: bool = False
    ) -> StepOutputs:
        """Compute a step and draw a token for each chunk that samples."""
        shape = self._inputs.write(step, sampling, keeps_logits=keeps_logits)
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
        num_tokens, num_seqs, num_rows, _ = shape
        inputs = self._inputs
        attention = PagedAttention(
            self.cache,
            block_tables_SB=inputs.block_tables_SB[:num_seqs],
            query_starts_S1=inputs.query_starts_S1[: num_seqs + 1],
            context_lens_S=inputs.context_lens_S[:num_seqs],
            max_length=self.model.rotary.num_positions,
        )
        hidden_TD: Tensor = self.model(
            inputs.tokens_T[:num_tokens], inputs.positions_T[:num_tokens], attention
        )
        groups = tuple(
            self._draw(hidden_TD, slice(start, min(start + LOGITS_ROWS, num_rows)), shape)
            for start in range(0, num_rows, LOGITS_ROWS)
        )
        return StepOutputs(hidden_TD, groups)

    def _draw(self, hidden_TD: Tensor, rows: slice, shape: StepShape) -> DrawnRows:
        inputs = self._inputs
        if shape.num_rows == shape.num_tokens:
            hidden_RD = hidden_TD[rows]
        else:
            hidden_RD = embedding(hidden_TD, inputs.rows_R[rows], dtype=hidden_TD.dtype)
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
            logits_RV if shape.keeps_logits else None,
        )
