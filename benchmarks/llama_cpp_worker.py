"""llama.cpp's side of side_by_side.py, through llama-cpp-python's low-level interface.

Its `Llama` class decodes one stream only, so batches are built by hand: every step is one
`llama_decode` over all streams. Settings are llama.cpp's defaults (f16 KV cache, flash attention
chosen by itself).
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Mapping, Sequence
from importlib import metadata
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from worker_loop import Handler, decoded, prefilled, reusable, serve
from workload import GENERATED_TOKENS, SHORT_CONTEXT_TOKENS

BATCH_TOKENS = 512
"""Computed together: llama.cpp's own default of physical batches."""


class Context:
    """A context for `num_streams` streams, and the batch that is handed to it."""

    def __init__(self, model: Any, *, num_streams: int, stream_tokens: int, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_streams * stream_tokens
        params.n_batch = params.n_ubatch = BATCH_TOKENS
        params.n_seq_max = num_streams
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        assert self._context, "llama.cpp could not make a context"
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def forget(self, *, start: int) -> None:
        """Drop what every stream holds from position `start` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, -1, start, -1)

    def step(self, tokens: Sequence[tuple[int, int, int]]) -> list[int]:
        """Compute (token, position, stream) triples, at most BATCH_TOKENS of them; the greedy
        successor of each stream's last.
        """
        last = {stream: index for index, (_, _, stream) in enumerate(tokens)}
        batch = self._batch
        batch.n_tokens = len(tokens)
        for index, (token, position, stream) in enumerate(tokens):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = stream
            batch.logits[index] = last[stream] == index
        code = llama_cpp.llama_decode(self._context, batch)
        assert code == 0, f"llama_decode gave {code}"
        logits = llama_cpp.llama_get_logits(self._context)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        rows = np.ctypeslib.as_array(pointer, shape=(len(last), self._vocab))
        return rows.argmax(axis=1).tolist()

    def read(self, prompt: Sequence[int], *, stream: int, start: int = 0) -> int:
        """Compute the tokens of a prompt from position `start` on; its greedy successor."""
        triples = [(token, position, stream) for position, token in enumerate(prompt)][start:]
        successor = 0
        for begin in range(0, len(triples), BATCH_TOKENS):
            (successor,) = self.step(triples[begin : begin + BATCH_TOKENS])
        return successor


class Inference:
    def __init__(self, model: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._threads = threads
        self._model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        assert self._model, f"llama.cpp could not load {model}"
        self._prefill = Context(
            self._model, num_streams=1, stream_tokens=SHORT_CONTEXT_TOKENS, threads=threads
        )
        self._held: list[int] = []
        self._decoders: dict[tuple[int, int], Context] = {}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        start = perf_counter()
        num_cached = reusable(self._held, prompt)
        self._prefill.forget(start=num_cached)
        token = self._prefill.read(prompt, stream=0, start=num_cached)
        seconds = perf_counter() - start
        self._held = prompt
        return prefilled(seconds, prompt, token, num_cached=num_cached)

    def decode(self, prompts: list[list[int]], num_generated: int) -> dict[str, Any]:
        context = self._decoder(prompts)
        position = len(prompts[0]) - 1
        context.forget(start=position)
        streams = range(len(prompts))
        tokens = context.step([(prompts[s][-1], position, s) for s in streams])
        steps = [tokens]
        start = perf_counter()
        for _ in range(num_generated - 1):
            position += 1
            tokens = context.step([(tokens[s], position, s) for s in streams])
            steps.append(tokens)
        seconds = perf_counter() - start
        return decoded(seconds, list(zip(*steps, strict=True)))

    def _decoder(self, prompts: list[list[int]]) -> Context:
        """A context that holds all of the prompts; they are computed once, untimed."""
        shape = (len(prompts), len(prompts[0]))
        if shape not in self._decoders:
            context = Context(
                self._model,
                num_streams=shape[0],
                stream_tokens=shape[1] + GENERATED_TOKENS,
                threads=self._threads,
            )
            for stream, prompt in enumerate(prompts):
                context.read(prompt, stream=stream)
            self._decoders[shape] = context
        return self._decoders[shape]


def describe() -> dict[str, Any]:
    return {
        "versions": {"llama-cpp-python": metadata.version("llama-cpp-python")},
        "notes": llama_cpp.llama_print_system_info().decode().strip(),
    }


def load(args: argparse.Namespace) -> Mapping[str, Handler]:
    inference = Inference(args.model, args.threads)
    return {"describe": describe, "prefill": inference.prefill, "decode": inference.decode}


if __name__ == "__main__":
    serve(load)
