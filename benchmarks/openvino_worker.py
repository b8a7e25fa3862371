"""OpenVINO GenAI's side of side_by_side.py: its continuous-batching pipeline, step by step.

Settings are its own but for the prefix cache, which is on, and the precision of fp32 and bf16,
which is asked for; its 8-bit KV cache and dynamic quantisation of activations stay.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import metadata
from itertools import count
from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from worker_loop import Handler, decoded, prefilled, serve
from workload import PREFILL_TOKENS

CACHE_GB = 1
HINTS = {"fp32": "f32", "bf16": "bf16"}


class Inference:
    def __init__(self, model: str, precision: str, threads: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = True
        scheduler.max_num_batched_tokens = max(PREFILL_TOKENS)
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
        if precision in HINTS:
            properties["INFERENCE_PRECISION_HINT"] = HINTS[precision]
        self._pipe = genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self._ids = count()

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        start = perf_counter()
        handle = self._add(prompt, 1)
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
        seconds = perf_counter() - start
        (token,) = _new_tokens(handle)
        return prefilled(seconds, prompt, token, num_cached=-1)

    def decode(self, prompts: list[list[int]], num_generated: int) -> dict[str, Any]:
        handles = [self._add(prompt, num_generated) for prompt in prompts]
        streams: list[list[int]] = [[] for _ in prompts]
        while not all(streams):
            self._pipe.step()
            for handle, stream in zip(handles, streams, strict=True):
                stream += _new_tokens(handle)
        untimed = sum(map(len, streams))
        start = perf_counter()
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
        seconds = perf_counter() - start
        for handle, stream in zip(handles, streams, strict=True):
            stream += _new_tokens(handle)
        return decoded(seconds, streams, untimed=untimed)

    def _add(self, prompt: list[int], num_generated: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = num_generated
        config.ignore_eos = True
        config.do_sample = False
        tokens = ov.Tensor(np.array([prompt], dtype=np.int64))
        return self._pipe.add_request(next(self._ids), tokens, config)


def _new_tokens(handle: Any) -> list[int]:
    """What was generated since the last call."""
    tokens: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            tokens += output.generated_ids
    return tokens


def describe() -> dict[str, Any]:
    names = ("openvino", "openvino-genai", "optimum-intel", "nncf")
    return {"versions": {name: metadata.version(name) for name in names}, "notes": ""}


def load(args: argparse.Namespace) -> Mapping[str, Handler]:
    inference = Inference(args.model, args.precision, args.threads)
    return {"describe": describe, "prefill": inference.prefill, "decode": inference.decode}


if __name__ == "__main__":
    serve(load)
