"""vLLM's side of side_by_side.py: its engine in this process, step by step, as ours is driven."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from importlib import metadata
from itertools import count
from time import perf_counter
from typing import Any

# Read when vllm is imported.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from worker_loop import Handler, decoded, prefilled, serve
from workload import CONTEXT_TOKENS, PREFILL_TOKENS

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
BLOCK_TOKENS = 32
"""The default of 128 would keep 896 of 960 shared tokens."""


class Inference:
    def __init__(self, model: str, precision: str) -> None:
        llm = LLM(
            model,
            dtype=DTYPES[precision],
            max_model_len=CONTEXT_TOKENS,
            max_num_batched_tokens=max(PREFILL_TOKENS),
            block_size=BLOCK_TOKENS,
            enable_prefix_caching=True,
        )
        self._engine = llm.llm_engine
        self._ids = count()

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        start = perf_counter()
        self._add(prompt, 1)
        tokens: list[int] = []
        num_cached = 0
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                tokens += output.outputs[0].token_ids
                num_cached = output.num_cached_tokens or 0
        seconds = perf_counter() - start
        return prefilled(seconds, prompt, tokens[0], num_cached=num_cached)

    def decode(self, prompts: list[list[int]], num_generated: int) -> dict[str, Any]:
        streams = {self._add(prompt, num_generated): list[int]() for prompt in prompts}
        while not all(streams.values()):
            self._step(streams)
        untimed = sum(map(len, streams.values()))
        start = perf_counter()
        while self._engine.has_unfinished_requests():
            self._step(streams)
        seconds = perf_counter() - start
        return decoded(seconds, list(streams.values()), untimed=untimed)

    def _step(self, streams: dict[str, list[int]]) -> None:
        for output in self._engine.step():
            streams[output.request_id] += output.outputs[0].token_ids

    def _add(self, prompt: list[int], num_generated: int) -> str:
        params = SamplingParams(
            max_tokens=num_generated,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        request_id = str(next(self._ids))
        self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), params)
        return request_id


def describe() -> dict[str, Any]:
    names = ("vllm-cpu", "torch", "transformers")
    return {"versions": {name: metadata.version(name) for name in names}, "notes": ""}


def load(args: argparse.Namespace) -> Mapping[str, Handler]:
    inference = Inference(args.model, args.precision)
    return {"describe": describe, "prefill": inference.prefill, "decode": inference.decode}


if __name__ == "__main__":
    serve(load)
