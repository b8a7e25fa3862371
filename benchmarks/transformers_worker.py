"""transformers' side of side_by_side.py: its model and cache in a bare loop; PEFT for LoRA.

`generate` does more than this, so these figures are the better ones for transformers. Training in
bf16 is torch.autocast over fp32 adapters (LoRA, base weights in bf16) or fp32 weights (full).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import metadata
from itertools import count
from time import perf_counter
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache
from worker_loop import Handler, decoded, prefilled, reusable, serve
from workload import LEARNING_RATE, LORA_ALPHA, LORA_RANK, SEED, sft_documents

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Inference:
    def __init__(self, model: str, precision: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES[precision]).eval()
        self._held: list[int] = []
        self._prefix = self._fresh()
        self._caches: dict[tuple[int, int], DynamicCache] = {}

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Its cache keeps the last prompt, of which a common beginning is used again."""
        start = perf_counter()
        num_cached = reusable(self._held, prompt)
        if num_cached == 0:
            self._prefix = self._fresh()
        _keep(self._prefix, num_cached)
        token = int(self._step(torch.tensor([prompt[num_cached:]]), self._prefix))
        seconds = perf_counter() - start
        self._held = prompt
        return prefilled(seconds, prompt, token, num_cached=num_cached)

    @torch.inference_mode()
    def decode(self, prompts: list[list[int]], num_generated: int) -> dict[str, Any]:
        shape = (len(prompts), len(prompts[0]))
        if shape not in self._caches:
            self._caches[shape] = self._fresh()
            self._step(torch.tensor(prompts)[:, :-1], self._caches[shape])
        cache = self._caches[shape]
        _keep(cache, shape[1] - 1)
        tokens = self._step(torch.tensor(prompts)[:, -1:], cache)
        steps = [tokens]
        start = perf_counter()
        for _ in range(num_generated - 1):
            tokens = self._step(tokens, cache)
            steps.append(tokens)
        seconds = perf_counter() - start
        return decoded(seconds, torch.cat(steps, dim=1).tolist())

    def _fresh(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)

    def _step(self, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """The greedy successor of each stream, as a column."""
        output = self._model(
            input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1].argmax(dim=-1, keepdim=True)


def _keep(cache: DynamicCache, num_tokens: int) -> None:
    if surplus := cache.get_seq_length() - num_tokens:
        cache.crop(-surplus)


class Training:
    """Optimizer steps; the model is made on first use."""

    def __init__(self, model: str, precision: str) -> None:
        self._source, self._precision = model, precision
        self._models: dict[str, tuple[torch.nn.Module, torch.optim.Optimizer]] = {}
        self._steps = count()

    def sft(self, method: str, text: list[int]) -> dict[str, Any]:
        model, optimizer = self._models.get(method) or self._models.setdefault(
            method, self._build(method)
        )
        tokens = torch.tensor(sft_documents(text, next(self._steps)))
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
    if args.training:
        return {"describe": describe, "sft": Training(args.model, args.precision).sft}
    inference = Inference(args.model, args.precision)
    return {"describe": describe, "prefill": inference.prefill, "decode": inference.decode}


if __name__ == "__main__":
    serve(load)
