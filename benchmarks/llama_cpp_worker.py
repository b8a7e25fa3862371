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
from worker_loop import Handler, serve
from workload import GENERATED_TOKENS, PREFILL_TOKENS, PROMPT_TOKENS


class Context:
    """A context for `num_streams` streams, and the batch that is handed to it."""

    def __init__(self, model: Any, *, num_streams: int, stream_tokens: int, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = num_streams * stream_tokens
        params.n_batch = params.n_ubatch = PREFILL_TOKENS
        params.n_seq_max = num_streams
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, params)
        assert self._context, "llama.cpp could not make a context"
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(PREFILL_TOKENS, 0, 1)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.prompts: Sequence[Sequence[int]] | None = None

    def forget(self, *, start: int) -> None:
        """Drop what every stream holds from position `start` on."""
        llama_cpp.llama_memory_seq_rm(self._memory, -1, start, -1)

    def step(self, tokens: Sequence[tuple[int, int, int]]) -> list[int]:
        """Compute (token, position, stream) triples; the greedy successor of each stream's last."""
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


class Inference:
    def __init__(self, model: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._threads = threads
        self._model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        assert self._model, f"llama.cpp could not load {model}"
        self._prefill = Context(
            self._model, num_streams=1, stream_tokens=PREFILL_TOKENS, threads=threads
        )
        self._decoders: dict[int, Context] = {}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        self._prefill.forget(start=0)
        triples = [(token, position, 0) for position, token in enumerate(prompt)]
        start = perf_counter()
        token_ids = [self._prefill.step(triples)]
        seconds = perf_counter() - start
        return {"seconds": seconds, "num_tokens": len(prompt), "token_ids": token_ids}

    def decode(self, prompts: list[list[int]], num_generated: int) -> dict[str, Any]:
        """Timed from when every stream has its first token."""
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
        token_ids = [list(stream) for stream in zip(*steps, strict=True)]
        num_tokens = len(prompts) * (num_generated - 1)
        return {"seconds": seconds, "num_tokens": num_tokens, "token_ids": token_ids}

    def _decoder(self, prompts: list[list[int]]) -> Context:
        """A context that holds all of the prompts; they are computed once, untimed."""
        if len(prompts) not in self._decoders:
            context = Context(
                self._model,
                num_streams=len(prompts),
                stream_tokens=PROMPT_TOKENS + GENERATED_TOKENS,
                threads=self._threads,
            )
            for stream, prompt in enumerate(prompts):
                context.step([(token, position, stream) for position, token in enumerate(prompt)])
            self._decoders[len(prompts)] = context
        return self._decoders[len(prompts)]


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
