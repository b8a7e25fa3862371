"""Lockstep's side of side_by_side.py: the public Engine for inference.

Training is in ours_training.py, which is imported only for it, so that serving's start-up and
memory are those of serving.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import count
from time import perf_counter
from typing import Any

from worker_loop import Handler, decoded, prefilled, serve

import lockstep
from lockstep import kernels
from lockstep.core.sampling import SamplingParams
from lockstep.engine import Engine, Request
from lockstep.models import load_model
from lockstep.models.loading import LoadedModel

SCHEMES = {"int8": "int8", "int4": "int4", "shipped": "native"}
"""Weight schemes by precision; what is not a weight is in bf16."""


class Inference:
    """The engine as users have it, prefix cache and detokenizer included."""

    def __init__(self, model: str, precision: str) -> None:
        loaded = load_for_serving(model, precision)
        self._engine = Engine(loaded.model, loaded.tokenizer)
        self._calls = count()

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        start = perf_counter()
        completion = self._engine.generate([prompt], params)[0]
        seconds = perf_counter() - start
        (token,) = completion.samples[0].token_ids
        return prefilled(seconds, prompt, token, num_cached=completion.num_cached_tokens)

    def decode(self, prompts: list[list[int]], num_generated: int) -> dict[str, Any]:
        call = next(self._calls)
        params = SamplingParams(max_tokens=num_generated, temperature=0, ignore_eos=True)
        streams: dict[str, list[int]] = {f"{call}-{number}": [] for number in range(len(prompts))}
        for name, prompt in zip(streams, prompts, strict=True):
            self._engine.add_request(
                Request(request_id=name, prompt_token_ids=prompt, params=params)
            )
        while not all(streams.values()):
            self._step(streams)
        untimed = sum(map(len, streams.values()))
        start = perf_counter()
        while self._engine.has_work:
            self._step(streams)
        seconds = perf_counter() - start
        return decoded(seconds, list(streams.values()), untimed=untimed)

    def _step(self, streams: dict[str, list[int]]) -> None:
        for delta in self._engine.step():
            streams[delta.request_id] += delta.token_ids


def load_for_serving(model: str, precision: str) -> LoadedModel:
    """The one place where a name of the table becomes a way to load."""
    if precision in ("fp32", "bf16"):
        return load_model(model, precision=precision, packed=True, quiet=True)
    return load_model(model, weights=SCHEMES[precision], packed=True, quiet=True)


def describe() -> dict[str, Any]:
    return {
        "versions": {"lockstep": lockstep.__version__},
        "notes": f"kernels: {kernels.isa() or kernels.missing_reason()}",
    }


def load(args: argparse.Namespace) -> Mapping[str, Handler]:
    kernels.set_num_threads(args.threads)
    if args.training:
        from ours_training import Training

        return {"describe": describe, "sft": Training(args.model, args.precision).sft}
    inference = Inference(args.model, args.precision)
    return {"describe": describe, "prefill": inference.prefill, "decode": inference.decode}


if __name__ == "__main__":
    serve(load)
