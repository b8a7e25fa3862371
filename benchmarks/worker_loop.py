"""The child's side of a worker: one JSON request a line in, one JSON answer a line out.

Whatever a library prints goes to stderr, so it cannot be taken for an answer. Every inference
worker answers the same two requests:

    prefill(prompt)                 one greedy token after `prompt`, timed; what the last prompts
                                    left in the system's prefix cache may be used
    decode(prompts, num_generated)  greedy streams, timed from when each has its first token
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Handler = Callable[..., dict[str, Any]]


class UnsupportedError(Exception):
    """The system has no such precision; the row is reported as missing."""


def arguments() -> argparse.Namespace:
    """What each worker is started with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--training", action="store_true", help="for `sft` instead of inference")
    return parser.parse_args()


def serve(load: Callable[[argparse.Namespace], Mapping[str, Handler]]) -> None:
    """Load, say so with an empty answer (or why not), then answer requests until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        handlers = load(arguments())
    except UnsupportedError as error:
        answers.write(json.dumps({"unsupported": str(error)}) + "\n")
        return
    answers.write("{}\n")
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(handlers[request.pop("op")](**request)) + "\n")


def prefilled(
    seconds: float, prompt: Sequence[int], token: int, *, num_cached: int
) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "num_tokens": len(prompt),
        "num_cached": num_cached,
        "token_ids": [[token]],
    }


def decoded(
    seconds: float, token_ids: Sequence[Sequence[int]], *, untimed: int | None = None
) -> dict[str, Any]:
    """`untimed` tokens, by default one of each stream, came before the clock was started."""
    before = len(token_ids) if untimed is None else untimed
    return {
        "seconds": seconds,
        "num_tokens": sum(map(len, token_ids)) - before,
        "token_ids": [list(stream) for stream in token_ids],
    }


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))


def reusable(held: Sequence[int], prompt: Sequence[int]) -> int:
    """Tokens of `prompt` that need not be computed again; its last one always is."""
    return min(common_prefix(held, prompt), len(prompt) - 1)
