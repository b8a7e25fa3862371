"""Lockstep's training side of side_by_side.py: the Trainer that SFT and RL share."""

from __future__ import annotations

from itertools import count
from time import perf_counter
from typing import Any

from workload import LEARNING_RATE, LORA_ALPHA, LORA_RANK, SFT_TOKENS, sft_documents

from lockstep.models import load_model
from lockstep.models.lora import apply_lora
from lockstep.models.lora_config import LoraConfig
from lockstep.train.config import OptimizerConfig, ScheduleConfig
from lockstep.train.packing import Document, pack, total_weight
from lockstep.train.step import negative_log_likelihood
from lockstep.train.trainer import Trainer


class Training:
    """Optimizer steps, of the method of the first request."""

    def __init__(self, model: str, precision: str) -> None:
        self._source, self._precision = model, precision
        self._trainers: dict[str, Trainer] = {}
        self._steps = count()

    def sft(self, method: str, text: list[int]) -> dict[str, Any]:
        trainer = self._trainers.get(method) or self._trainers.setdefault(
            method, self._trainer(method)
        )
        documents = sft_documents(text, next(self._steps))
        start = perf_counter()
        packed = pack(
            [Document(token_ids=ids, loss_weights=[1.0] * len(ids)) for ids in documents],
            max_tokens=SFT_TOKENS,
        )
        step = trainer.update(packed, negative_log_likelihood, normaliser=total_weight(packed))
        seconds = perf_counter() - start
        return {"seconds": seconds, "num_tokens": step.num_tokens, "loss": step.loss}

    def _trainer(self, method: str) -> Trainer:
        is_full = method == "full"
        loaded = load_model(
            self._source, precision=self._precision, master_weights=is_full, quiet=True
        )
        if not is_full:
            apply_lora(loaded.model, LoraConfig(r=LORA_RANK, alpha=LORA_ALPHA))
        return Trainer(
            loaded.model,
            optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
            schedule=ScheduleConfig(lr_schedule="constant"),
            num_steps=1000,
        )
