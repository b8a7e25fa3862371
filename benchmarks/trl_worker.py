"""TRL's side of side_by_side.py: SFTTrainer, one optimizer step a request.

`train()` runs in a thread of its own that waits before every step until the next request; a
request's time is from then until it waits again, all that the trainer does for a step included.
`mixed` is bf16=True over fp32 weights, `pure` has weights and optimizer in bf16.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Mapping
from importlib import metadata
from tempfile import mkdtemp
from time import perf_counter
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer
from worker_loop import Handler, serve
from workload import (
    LEARNING_RATE,
    LORA_ALPHA,
    LORA_RANK,
    SEED,
    SFT_DOCUMENT_TOKENS,
    SFT_DOCUMENTS,
    SFT_TOKENS,
    sft_documents,
)

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MAX_STEPS = 64


class Gate(TrainerCallback):
    """Lets one step pass at a time, and keeps what was logged of it."""

    def __init__(self) -> None:
        self._open = threading.Semaphore(0)
        self._reached = threading.Semaphore(0)
        self.loss = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._reached.release()
        self._open.acquire()

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.loss = logs.get("loss", self.loss)

    def wait_until_ready(self) -> None:
        self._reached.acquire()

    def let_pass(self) -> float:
        """Seconds until the trainer is ready for the next step."""
        start = perf_counter()
        self._open.release()
        self._reached.acquire()
        return perf_counter() - start


class Training:
    """One trainer, made for the method of the first request."""

    def __init__(self, model: str, precision: str) -> None:
        self._source, self._precision = model, precision
        self._gates: dict[str, Gate] = {}

    def sft(self, method: str, text: list[int]) -> dict[str, Any]:
        gate = self._gates.get(method) or self._gates.setdefault(method, self._start(method, text))
        seconds = gate.let_pass()
        return {"seconds": seconds, "num_tokens": SFT_TOKENS, "loss": gate.loss}

    def _start(self, method: str, text: list[int]) -> Gate:
        dtype = torch.bfloat16 if self._precision == "pure" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(self._source, dtype=dtype)
        lora = LoraConfig(
            r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM"
        )
        gate = Gate()
        trainer = SFTTrainer(
            model=model,
            args=self._config(),
            train_dataset=Dataset.from_dict(
                {"input_ids": [d for step in range(MAX_STEPS) for d in sft_documents(text, step)]}
            ),
            processing_class=AutoTokenizer.from_pretrained(self._source),
            peft_config=lora if method == "lora" else None,
            callbacks=[gate],
        )
        threading.Thread(target=trainer.train, daemon=True).start()
        gate.wait_until_ready()
        return gate

    def _config(self) -> SFTConfig:
        return SFTConfig(
            output_dir=mkdtemp(prefix="lockstep-bench-"),
            per_device_train_batch_size=SFT_DOCUMENTS,
            max_length=SFT_DOCUMENT_TOKENS,
            max_steps=MAX_STEPS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            warmup_steps=0,
            weight_decay=0.0,
            max_grad_norm=1.0,
            optim="adamw_torch_fused",
            train_sampling_strategy="sequential",
            bf16=self._precision != "fp32",
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=SEED,
        )


def describe() -> dict[str, Any]:
    names = ("trl", "transformers", "peft", "torch")
    return {"versions": {name: metadata.version(name) for name in names}, "notes": ""}


def load(args: argparse.Namespace) -> Mapping[str, Handler]:
    torch.set_num_threads(args.threads)
    return {"describe": describe, "sft": Training(args.model, args.precision).sft}


if __name__ == "__main__":
    serve(load)
