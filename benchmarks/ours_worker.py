"""Lockstep's side of side_by_side.py: the public Engine for inference, the Trainer for SFT."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping
from itertools import count
from time import perf_counter
from typing import Any

import torch
from worker_loop import Handler, serve
from workload import LEARNING_RATE, LORA_ALPHA, LORA_RANK

import lockstep
from lockstep import kernels
from lockstep.core.sampling import SamplingParams
from lockstep.engine import Engine, Request
from lockstep.models import load_model
from lockstep.models.attention import KVCache, PagedAttention
from lockstep.models.llama import Llama
from lockstep.models.lora import apply_lora
from lockstep.models.lora_config import LoraConfig
from lockstep.train.config import OptimizerConfig, ScheduleConfig
from lockstep.train.packing import Document, pack, total_weight
from lockstep.train.step import negative_log_likelihood
from lockstep.train.trainer import Trainer


class Inference:
    """The engine as users have it, prefix cache and detokenizer included."""

    def __init__(self, model: str, precision: str) -> None:
        loaded = load_model(model, precision=precision, quiet=True)
        self._model = loaded.model
        self._engine = Engine(loaded.model, loaded.tokenizer)
        self._calls = count()
        self._raw: dict[int, tuple[KVCache, torch.Tensor]] = {}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        start = perf_counter()
        completion = self._engine.generate([prompt], SamplingParams(max_tokens=1, temperature=0))[0]
        seconds = perf_counter() - start
        assert completion.num_cached_tokens == 0, "a cached prompt measures nothing"
        token_ids = [list(completion.samples[0].token_ids)]
        return {"seconds": seconds, "num_tokens": len(prompt), "token_ids": token_ids}

    def decode(self, prompts: list[list[int]], num_generated: int) -> dict[str, Any]:
        """Timed from when every stream has its first token."""
        call = next(self._calls)
        params = SamplingParams(max_tokens=num_generated, temperature=0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self._engine.add_request(
                Request(request_id=f"{call}-{number}", prompt_token_ids=prompt, params=params)
            )
        produced: defaultdict[str, list[int]] = defaultdict(list)
        while len(produced) < len(prompts):
            for delta in self._engine.step():
                produced[delta.request_id] += delta.token_ids
        before = sum(map(len, produced.values()))
        start = perf_counter()
        while self._engine.has_work:
            for delta in self._engine.step():
                produced[delta.request_id] += delta.token_ids
        seconds = perf_counter() - start
        token_ids = [produced[f"{call}-{number}"] for number in range(len(prompts))]
        num_tokens = sum(map(len, token_ids)) - before
        return {"seconds": seconds, "num_tokens": num_tokens, "token_ids": token_ids}

    @torch.no_grad()
    def decode_raw(self, prompts: list[list[int]], num_generated: int) -> dict[str, Any]:
        """The model alone: no scheduler, sampler, logprobs or text; what the engine adds shows."""
        batch, length = len(prompts), len(prompts[0])
        blocks = -(-(length + num_generated) // 16)
        if batch not in self._raw:
            cache = KVCache(self._model.config, batch * blocks, self._model.compute_dtype)
            self._raw[batch] = (cache, torch.zeros(0))
            first = torch.cat(
                [
                    self._raw_step(cache, row, blocks, prompt, 0).argmax(-1)
                    for row, prompt in enumerate(prompts)
                ]
            )
            self._raw[batch] = (cache, first)
        cache, tokens = self._raw[batch]
        token_ids = [tokens.tolist()]
        start = perf_counter()
        for position in range(length, length + num_generated - 1):
            tokens = self._raw_step(cache, None, blocks, tokens.tolist(), position).argmax(-1)
            token_ids.append(tokens.tolist())
        seconds = perf_counter() - start
        streams = [list(stream) for stream in zip(*token_ids, strict=True)]
        num_tokens = batch * (num_generated - 1)
        return {"seconds": seconds, "num_tokens": num_tokens, "token_ids": streams}

    def _raw_step(
        self, cache: KVCache, row: int | None, blocks: int, tokens: list[int], start: int
    ) -> torch.Tensor:
        """Logits after one token for every stream, or after a whole prompt of stream `row`."""
        rows = range(len(tokens)) if row is None else [row]
        per_row = 1 if row is None else len(tokens)
        attention = PagedAttention(
            cache,
            block_tables_SB=torch.tensor([[r * blocks + b for b in range(blocks)] for r in rows]),
            query_starts_S1=torch.arange(len(rows) + 1) * per_row,
            context_lens_S=torch.full((len(rows),), start),
            max_length=start + per_row,
        )
        positions = torch.arange(start, start + per_row).repeat(len(rows))
        hidden = self._model(torch.tensor(tokens), positions, attention)
        return self._model.logits(hidden[per_row - 1 :: per_row])


class Training:
    """Optimizer steps through the trainer that SFT and RL share; made on first use."""

    def __init__(self, model: str, precision: str) -> None:
        self._source, self._precision = model, precision
        self._trainers: dict[str, Trainer] = {}

    def sft(self, method: str, documents: list[list[int]]) -> dict[str, Any]:
        trainer = self._trainers.get(method) or self._trainers.setdefault(
            method, self._trainer(method)
        )
        start = perf_counter()
        packed = pack(
            [Document(token_ids=ids, loss_weights=[1.0] * len(ids)) for ids in documents],
            max_tokens=sum(map(len, documents)),
        )
        step = trainer.update(packed, negative_log_likelihood, normaliser=total_weight(packed))
        seconds = perf_counter() - start
        return {"seconds": seconds, "num_tokens": step.num_tokens, "loss": step.loss}

    def _trainer(self, method: str) -> Trainer:
        is_full = method == "full"
        loaded = load_model(
            self._source, precision=self._precision, master_weights=is_full, quiet=True
        )
        model: Llama = loaded.model
        if not is_full:
            apply_lora(model, LoraConfig(r=LORA_RANK, alpha=LORA_ALPHA))
        return Trainer(
            model,
            optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
            schedule=ScheduleConfig(lr_schedule="constant"),
            num_steps=1000,
        )


def describe() -> dict[str, Any]:
    return {
        "versions": {"lockstep": lockstep.__version__, "torch": torch.__version__},
        "notes": f"kernels: {kernels.isa() or kernels.missing_reason()}",
    }


def load(args: argparse.Namespace) -> Mapping[str, Handler]:
    kernels.set_num_threads(args.threads)
    inference = Inference(args.model, args.precision)
    training = Training(args.model, args.precision)
    return {
        "describe": describe,
        "prefill": inference.prefill,
        "decode": inference.decode,
        "decode_raw": inference.decode_raw,
        "sft": training.sft,
    }


if __name__ == "__main__":
    serve(load)
