"""The machine's own limits, as torch reaches them: reading memory, and matrix products.

Reading is `sum` over a buffer of the size a decode step reads; products are 512 rows by this
model's shapes and a square one, the best of them. Both are what a good program gets here, not data
sheet figures, so a figure above 100% only says that torch can be beaten.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from worker_loop import Handler, serve

SHAPES_KN = ((576, 1536), (1536, 576), (576, 49152), (1024, 1024), (2048, 2048))
ROWS = 512
REPEATS = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def limits(weight_bytes: dict[str, int]) -> dict[str, Any]:
    """Best of REPEATS; `weight_bytes` by precision."""
    return {
        "bytes_per_s": {name: _read(size) for name, size in weight_bytes.items()},
        "flops_per_s": {
            name: max(map(_multiply(dtype), SHAPES_KN)) for name, dtype in DTYPES.items()
        },
    }


def _read(num_bytes: int) -> float:
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32)
    return num_bytes / _best(buffer.sum)


def _multiply(dtype: torch.dtype) -> Callable[[tuple[int, int]], float]:
    def measure(shape_kn: tuple[int, int]) -> float:
        k, n = shape_kn
        x, weight = torch.randn(ROWS, k).to(dtype), torch.randn(n, k).to(dtype)
        return 2 * ROWS * k * n / _best(lambda: torch.nn.functional.linear(x, weight))

    return measure


def _best(action: Callable[[], Any]) -> float:
    action()
    seconds = []
    for _ in range(REPEATS):
        start = perf_counter()
        action()
        seconds.append(perf_counter() - start)
    return min(seconds)


def load(args: argparse.Namespace) -> Mapping[str, Handler]:
    torch.set_num_threads(args.threads)
    return {"limits": limits}


if __name__ == "__main__":
    serve(load)
