"""Training in bf16 with native kernels follows plain torch in fp32, and memory settings change no
bit of it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lockstep.kernels.dispatch import use_reference
from lockstep.models.llama import Llama
from lockstep.train.config import OptimizerConfig, ScheduleConfig
from lockstep.train.packing import Document, pack, total_weight
from lockstep.train.step import negative_log_likelihood
from lockstep.train.trainer import Trainer

STEPS = 20


def losses(model: Llama, documents: list[Document]) -> list[float]:
    trainer = Trainer(
        model,
        optimizer=OptimizerConfig(learning_rate=3e-3),
        schedule=ScheduleConfig(lr_schedule="constant"),
        num_steps=STEPS,
    )
    batches = pack(documents, max_tokens=64)
    assert len(batches) > 1, "gradients must be added up over micro-batches"
    normaliser = total_weight(batches)
    return [
        trainer.update(batches, negative_log_likelihood, normaliser=normaliser).loss
        for _ in range(STEPS)
    ]


def test_bf16_follows_plain_torch_in_fp32(
    make_model: Callable[..., Llama], make_documents: Callable[..., list[Document]]
) -> None:
    documents = make_documents([30, 50, 12, 41])
    ours = losses(make_model(compute_dtype=torch.bfloat16), documents)
    with use_reference():
        exact = losses(make_model(), documents)
    assert exact[-1] < 0.9 * exact[0]
    torch.testing.assert_close(ours, exact, rtol=0.01, atol=0.0)


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("setting", ["recompute_mlp", "activation_checkpointing"])
def test_recomputing_changes_no_bit(
    make_model: Callable[..., Llama],
    make_documents: Callable[..., list[Document]],
    compute_dtype: torch.dtype,
    setting: str,
) -> None:
    documents = make_documents([30, 50, 12, 41])
    plain, recomputing = (make_model(compute_dtype=compute_dtype) for _ in range(2))
    if setting == "recompute_mlp":
        recomputing.recompute_mlp(True)
    else:
        recomputing.activation_checkpointing = True
    assert losses(recomputing, documents) == losses(plain, documents)
    for ours, wanted in zip(recomputing.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, wanted)
