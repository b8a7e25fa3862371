"""transformers' side of side_by_side.py: its model and cache in a bare loop; PEFT for LoRA.

`generate` and TRL's trainer do more than this, so these figures are the better ones for
transformers. Training in bf16 is torch.autocast over fp32 adapters (LoRA, base weights in bf16) or
fp32 weights (full), as TRL's `bf16=True` computes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import metadata
from time import perf_counter
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache
from worker_loop import Handler, serve
from workload import LEARNING_RATE, LORA_ALPHA, LORA_RANK, SEED

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Inference:
    def __init__(self, model: str, precision: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[precision]).eval()
        self._caches: dict[int, DynamicCache] = {}

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        start = perf_counter()
        tokens = self._step(torch.tensor([prompt]), DynamicCache(config=self._model.config))
        seconds = perf_counter() - start
        return {"seconds": seconds, "num_tokens": len(prompt), "token_ids": tokens.tolist()}

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], num_generated: int) -> dict[str, Any]:
        """Timed from when every stream has its first token."""
        batch, context = len(prompts), len(prompts[0]) - 1
        if batch not in self._caches:
            self._caches[batch] = DynamicCache(config=self._model.config)
            self._step(torch.tensor(prompts)[:, :-1], self._caches[batch])
        cache = self._caches[batch]
        if surplus := cache.get_seq_length() - context:
            cache.crop(-surplus)
        tokens = self._step(torch.tensor(prompts)[:, -1:], cache)
        steps = [tokens]
        start = perf_counter()
        for _ in range(num_generated - 1):
            tokens = self._step(tokens, cache)
            steps.append(tokens)
        seconds = perf_counter() - start
        token_ids = torch.cat(steps, dim=1).tolist()
        num_tokens = batch * (num_generated - 1)
        return {"seconds": seconds, "num_tokens": num_tokens, "token_ids": token_ids}

    def _step(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The greedy successor of each stream, as a column."""
        output = self._model(
            input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1].argmax(dim=-1, keepdim=True)


class Training:
    """Optimizer steps; the model is made on first use."""

    def __init__(self, model: str, precision: str) -> None:
        self._source, self._precision = model, precision
        self._models: dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]] = {}

    def sft(self, method: str, documents: list[list[int]]) -> dict[str, Any]:
        model, optimizer = self._models.get(method) or self._models.setdefault(
            method, self._build(method)
        )
        tokens = torch.tensor(documents)
        start = perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._precision == "bf16"):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        trainable = [weight for weight in model.parameters() if weight.requires_grad]
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        seconds = perf_counter() - start
        return {"seconds": seconds, "num_tokens": tokens.numel(), "loss": loss.item()}

    def _build(self, method: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(SEED)
        is_lora = method == "lora"
        dtype = DTYPES[self._precision] if is_lora else torch.float32
        model = AutoModelForCausalLM.from_pretrained(self._source, dtype=dtype)
        if is_lora:
            config = LoraConfig(
                r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM"
            )
            model = get_peft_model(model, config)
        model.train()
        trainable = [weight for weight in model.parameters() if weight.requires_grad]
        return model, torch.optim.AdamW(trainable, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def describe() -> dict[str, Any]:
    names = ("torch", "transformers", "peft")
    return {"versions": {name: metadata.version(name) for name in names}, "notes": ""}


def load(args: argparse.Namespace) -> Mapping[str, Handler]:
    torch.set_num_threads(args.threads)
    inference = Inference(args.model, args.precision)
    training = Training(args.model, args.precision)
    return {
        "describe": describe,
        "prefill": inference.prefill,
        "decode": inference.decode,
        "sft": training.sft,
    }


if __name__ == "__main__":
    serve(load)
