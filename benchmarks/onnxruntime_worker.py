"""ONNX Runtime GenAI's side of side_by_side.py: one generator for each number of streams.

Streams of a generator have the same length. A generator of one stream is rewound to what a prompt
shares with the last one, which is its prefix cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import metadata
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime_genai as og
from worker_loop import Handler, decoded, prefilled, reusable, serve
from workload import GENERATED_TOKENS, SHORT_CONTEXT_TOKENS


class Streams:
    """A generator and the prompts it holds."""

    def __init__(self, model: Any, *, batch: int, max_tokens: int) -> None:
        params = og.GeneratorParams(model)
        # min_length keeps the end token from being drawn
        params.set_search_options(
            batch_size=batch, max_length=max_tokens, min_length=max_tokens, do_sample=False
        )
        self._generator = og.Generator(model, params)
        self.prompts: list[list[int]] = [[] for _ in range(batch)]

    def start(self, prompts: list[list[int]]) -> int:
        """Compute all of the prompts but what is there already; how many tokens that was."""
        # several streams can only be rewound to nothing
        held = reusable(self.prompts[0], prompts[0]) if len(prompts) == 1 else 0
        self._generator.rewind_to(held)
        rest = np.array([prompt[held:] for prompt in prompts], dtype=np.int32)
        self._generator.append_tokens(rest)
        self.prompts = prompts
        return held

    def step(self) -> None:
        self._generator.generate_next_token()

    def generated(self) -> list[list[int]]:
        return [
            self._generator.get_sequence(index)[len(prompt) :].tolist()
            for index, prompt in enumerate(self.prompts)
        ]


class Inference:
    def __init__(self, model: str, threads: int) -> None:
        config = og.Config(model)
        options = f'"session_options": {{"intra_op_num_threads": {threads}}}'
        config.overlay(f'{{"model": {{"decoder": {{{options}}}}}}}')
        self._model = og.Model(config)
        self._prefill: Streams | None = None
        self._decoders: dict[tuple[int, int], Streams] = {}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        if self._prefill is None:
            self._prefill = Streams(self._model, batch=1, max_tokens=SHORT_CONTEXT_TOKENS)
        start = perf_counter()
        num_cached = self._prefill.start([prompt])
        self._prefill.step()
        token = self._prefill.generated()[0][0]
        return prefilled(perf_counter() - start, prompt, token, num_cached=num_cached)

    def decode(self, prompts: list[list[int]], num_generated: int) -> dict[str, Any]:
        shape = (len(prompts), len(prompts[0]))
        if shape not in self._decoders:
            self._decoders[shape] = Streams(
                self._model, batch=shape[0], max_tokens=shape[1] + GENERATED_TOKENS
            )
        streams = self._decoders[shape]
        streams.start(prompts)
        streams.step()
        start = perf_counter()
        for _ in range(num_generated - 1):
            streams.step()
        seconds = perf_counter() - start
        return decoded(seconds, streams.generated())


def describe() -> dict[str, Any]:
    names = ("onnxruntime", "onnxruntime-genai")
    return {"versions": {name: metadata.version(name) for name in names}, "notes": ""}


def load(args: argparse.Namespace) -> Mapping[str, Handler]:
    inference = Inference(args.model, args.threads)
    return {"describe": describe, "prefill": inference.prefill, "decode": inference.decode}


if __name__ == "__main__":
    serve(load)
