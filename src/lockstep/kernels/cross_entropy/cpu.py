"""Native cross-entropy fused with the last projection, in chunks of rows, so the logits are never
whole.

A chunk of logits stays in cache between the product and the row pass.
`token_logprobs_with_gradient` makes the gradients while a chunk is at hand, so a training step
computes its logits once; `token_logprobs_backward` computes them again. Logits are made for 64 rows
at a time; where the weight's gradient is summed too, theirs are gathered for 192, as it is read and
written once for each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.kernels.linear.cpu import add_grad_weight, gemm, pack_temporary
from lockstep.kernels.native_library import DTYPE_CODE, native

_CHUNK, _GATHERED = 64, 192


def row_logprobs(
    logits_TV: Tensor, targets_T: Tensor, inverse_temperature_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    t, v = logits_TV.shape
    logits_TV = logits_TV.contiguous()
    logprobs, lse, entropy = (torch.empty(t, dtype=torch.float32) for _ in range(3))
    native().ls_row_logprobs(
        logprobs.data_ptr(),
        lse.data_ptr(),
        entropy.data_ptr(),
        logits_TV.data_ptr(),
        targets_T.data_ptr(),
        inverse_temperature_T.data_ptr(),
        t,
        v,
    )
    return logprobs, lse, entropy


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    packed: Tensor,
    targets_T: Tensor,
    inverse_temperature_T: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    vocab_size = weight_VD.shape[0]
    parts = []
    for hidden, targets, scale in zip(
        hidden_TD.split(_CHUNK),
        targets_T.split(_CHUNK),
        inverse_temperature_T.split(_CHUNK),
        strict=True,
    ):
        logits = gemm(hidden, packed, vocab_size, out_dtype=torch.float32)
        parts.append(row_logprobs(logits, targets, scale))
    logprobs, lse, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, lse, entropy


def token_logprobs_backward(
    dlogprobs_T: Tensor,
    hidden_TD: Tensor,
    weight_VD: Tensor,
    packed: Tensor,
    targets_T: Tensor,
    inverse_temperature_T: Tensor,
    lse_T: Tensor,
    weight_needs_grad: bool,
) -> tuple[Tensor, Tensor]:
    gradients = _Gradients(hidden_TD, weight_VD, hidden_TD.dtype, weight_needs_grad)
    for rows in gradients.chunks():
        logits = gradients.logits(rows, packed)
        gradients.add(
            rows,
            logits,
            lse_T[rows],
            targets_T[rows],
            inverse_temperature_T[rows],
            dlogprobs_T[rows],
        )
    gradients.finish()
    return gradients.dhidden_TD, gradients.dweight_VD


def token_logprobs_with_gradient(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    packed: Tensor,
    targets_T: Tensor,
    inverse_temperature_T: Tensor,
    coefficients_T: Tensor,
    weight_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradients = _Gradients(hidden_TD, weight_VD, torch.float32, weight_needs_grad)
    statistics = [torch.empty(hidden_TD.shape[0], dtype=torch.float32) for _ in range(3)]
    for rows in gradients.chunks():
        targets, scale = targets_T[rows], inverse_temperature_T[rows]
        logits = gradients.logits(rows, packed)
        logprobs, lse, entropy = row_logprobs(logits, targets, scale)
        for whole, part in zip(statistics, (logprobs, lse, entropy), strict=True):
            whole[rows] = part
        gradients.add(rows, logits, lse, targets, scale, coefficients_T[rows])
    gradients.finish()
    logprobs, lse, entropy = statistics
    return logprobs, lse, entropy, gradients.dhidden_TD, gradients.dweight_VD


class _Gradients:
    """Of a weighted sum of logprobs, chunk by chunk in the order of the rows."""

    def __init__(
        self, hidden_TD: Tensor, weight_VD: Tensor, dtype: torch.dtype, weight_needs_grad: bool
    ) -> None:
        self._hidden_TD, self._vocab_size = hidden_TD.contiguous(), weight_VD.shape[0]
        self._packed = pack_temporary(weight_VD.t(), hidden_TD.dtype)
        self._weight_needs_grad = weight_needs_grad
        num_gathered = min(_GATHERED if weight_needs_grad else _CHUNK, len(hidden_TD))
        # One for all chunks: fresh memory is slow memory.
        self._logits = torch.empty(min(_CHUNK, len(hidden_TD)), self._vocab_size)
        self._dlogits = torch.empty(num_gathered, self._vocab_size, dtype=hidden_TD.dtype)
        self._gathered = slice(0, 0)
        self.dhidden_TD = torch.empty(hidden_TD.shape, dtype=dtype)
        self.dweight_VD = torch.empty(weight_VD.shape if weight_needs_grad else 0)
        if weight_needs_grad and len(hidden_TD) == 0:
            self.dweight_VD.zero_()

    def chunks(self) -> Iterator[slice]:
        for start in range(0, len(self._hidden_TD), _CHUNK):
            yield slice(start, min(start + _CHUNK, len(self._hidden_TD)))

    def logits(self, rows: slice, packed: Tensor) -> Tensor:
        out = self._logits[: rows.stop - rows.start]
        return gemm(self._hidden_TD[rows], packed, self._vocab_size, out=out)

    def add(
        self,
        rows: slice,
        logits: Tensor,
        lse_R: Tensor,
        targets_R: Tensor,
        inverse_temperature_R: Tensor,
        coefficients_R: Tensor,
    ) -> None:
        """The part of one chunk; a few of them together go into the gradients."""
        if rows.stop - self._gathered.start > len(self._dlogits):
            self.finish()
        begin = rows.start - self._gathered.start
        self._gathered = slice(self._gathered.start, rows.stop)
        dlogits = self._dlogits[begin : begin + len(logits)]
        native().ls_row_softmax_grad(
            dlogits.data_ptr(),
            DTYPE_CODE[dlogits.dtype],
            logits.data_ptr(),
            lse_R.data_ptr(),
            targets_R.data_ptr(),
            inverse_temperature_R.data_ptr(),
            coefficients_R.data_ptr(),
            *logits.shape,
        )

    def finish(self) -> None:
        """Products of the logits' gradients gathered so far."""
        rows = self._gathered
        hidden, dlogits = self._hidden_TD[rows], self._dlogits[: rows.stop - rows.start]
        gemm(dlogits, self._packed, hidden.shape[1], out=self.dhidden_TD[rows])
        if self._weight_needs_grad and len(hidden):
            add_grad_weight(self.dweight_VD, dlogits, hidden, accumulate=rows.start > 0)
        self._gathered = slice(rows.stop, rows.stop)
