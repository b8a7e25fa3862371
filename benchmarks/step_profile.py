"""Where the time of an engine step goes, kernel by kernel.

The engine runs until it has recorded a step of the wanted kind; the recorded program is then made
again call by call, and each call is timed. Weights are as cold as in a real step, for all of them
lie between two uses of one.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import median

from rich.console import Console
from rich.table import Table
from workload import GENERATED_TOKENS, PROMPT_TOKENS

from lockstep import kernels
from lockstep.core.sampling import SamplingParams
from lockstep.engine import Engine, Request
from lockstep.kernels.capture import Program, Sizes
from lockstep.models import load_model
from lockstep.models.fetch import fetch_gguf, fetch_model

GEMM_SIZES = 14
"""Slot of M within a call of gemm, N and K behind it."""


def engine_of(model: str, weights: str) -> Engine:
    if weights in ("bf16", "fp32"):
        loaded = load_model(fetch_model(model, quiet=True), precision=weights, packed=True)  # type: ignore[arg-type]
    elif weights == "native":
        loaded = load_model(fetch_gguf(model, quiet=True), weights="native", packed=True)
    else:
        loaded = load_model(fetch_model(model, quiet=True), weights=weights, packed=True)
    return Engine(loaded.model, None)


def program_of(engine: Engine, *, streams: int, prompt: int, cached: int) -> tuple[Program, Sizes]:
    """The program of such requests' decode steps, or with no streams of the chunk of a prompt."""
    generated = 1 if streams == 0 else GENERATED_TOKENS // 2
    for serial in range(3):  # the first packs weights, the second finds its beginning cached
        params = SamplingParams(max_tokens=generated, temperature=0, ignore_eos=True)
        for number in range(max(streams, 1)):
            own = 1000 + 100 * serial + number
            tokens = [20 + place for place in range(cached)] + [own] * (prompt - cached)
            engine.add_request(
                Request(request_id=str(number), prompt_token_ids=tokens, params=params)
            )
        while engine.has_work:
            engine.step()
    ready = engine._runner.programs._ready
    wanted = [shape for shape in ready if not streams or shape.sizes == (streams,)][-1]
    return ready[wanted][0], wanted.sizes


def labels(program: Program, sizes: Sizes) -> list[str]:
    """Names of the calls; a product's with its sizes."""
    slots = program.slots_at(sizes)
    return [
        "gemm {} x {} x {}".format(*slots[place + GEMM_SIZES : place + GEMM_SIZES + 3])
        if name == "gemm"
        else name
        for name, place in zip(program.names, program.places, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="bf16", help="bf16, fp32, native or a scheme")
    parser.add_argument("--streams", type=int, default=1, help="0: a chunk of the prompt instead")
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--cached", type=int, default=0, help="tokens of the prompt in the cache")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    kernels.set_num_threads(args.threads)
    engine = engine_of(args.model, args.weights)
    program, sizes = program_of(
        engine, streams=args.streams, prompt=args.prompt, cached=args.cached
    )
    samples = [program.time_calls(sizes) for _ in range(args.repeats)]
    medians = [median(column) for column in zip(*samples, strict=True)]
    by_kernel: dict[str, list[float]] = defaultdict(list)
    for name, seconds in zip(labels(program, sizes), medians, strict=True):
        by_kernel[name].append(seconds)
    total = sum(medians)
    about = f"{args.model}, {args.weights}, {args.threads} threads, sizes {sizes}"
    table = Table(
        "kernel", "calls", "us each", "ms", "share", title=f"{about}: {total * 1e3:.2f} ms"
    )
    for name, times in sorted(by_kernel.items(), key=lambda item: -sum(item[1])):
        spent = sum(times)
        table.add_row(
            name,
            str(len(times)),
            f"{spent / len(times) * 1e6:,.1f}",
            f"{spent * 1e3:.2f}",
            f"{spent / total:.0%}",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
