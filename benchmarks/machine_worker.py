"""The machine's own limits, measured: reading memory, and matrix products of 512 rows.

Reading is comparison.c's loop over a buffer of the size a task reads; products are the best of
torch's (oneDNN), ours and the free-order kernels of comparison.c, at this model's shapes and square
ones. Both are what a good program gets here, not data sheet figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import numpy as np
import torch
from compiled import comparison
from free_order import FreeProduct
from worker_loop import Handler, serve

from lockstep import kernels
from lockstep.kernels.linear import PackCache, linear

ROWS = 512
REPEATS = 5
SQUARES_KN = ((1024, 1024), (2048, 2048))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Shape = tuple[int, int]


class Machine:
    def __init__(self, threads: int) -> None:
        self._threads = threads
        comparison().set_threads(threads)
        kernels.set_num_threads(threads)
        torch.set_num_threads(threads)  # our library has left torch one

    def limits(self, sizes: list[int], shapes_kn: list[list[int]]) -> dict[str, Any]:
        """Best of REPEATS. Bytes a second by size; operations a second by kind and by program."""
        shapes = [*SQUARES_KN, *((k, n) for k, n in shapes_kn)]
        programs = {
            "fp32": {"torch": _torch_float("fp32"), "ours": _ours("fp32")},
            "bf16": {
                "torch": _torch_float("bf16"),
                "ours": _ours("bf16"),
                "free order": _free("bf16"),
            },
            "int8": {"torch": _torch_int8, "free order": _free("int8")},
        }
        rates = {
            kind: {name: max(map(each, shapes)) for name, each in by_name.items()}
            for kind, by_name in programs.items()
        }
        return {
            "bytes_per_s": {str(size): _read(size) for size in sizes},
            "products": rates,
            "flops_per_s": {kind: max(by_name.values()) for kind, by_name in rates.items()},
        }


def _read(num_bytes: int) -> float:
    buffer = np.ones(num_bytes, dtype=np.uint8)
    address = buffer.ctypes.data
    return num_bytes / _best(lambda: comparison().read_all(address, num_bytes))


def _torch_float(kind: str) -> Callable[[Shape], float]:
    def measure(shape_kn: Shape) -> float:
        x, weight = _operands(shape_kn, DTYPES[kind])
        return _rate(shape_kn, lambda: torch.nn.functional.linear(x, weight))

    return measure


def _ours(kind: str) -> Callable[[Shape], float]:
    def measure(shape_kn: Shape) -> float:
        x, weight = _operands(shape_kn, DTYPES[kind])
        packs = PackCache()
        return _rate(shape_kn, lambda: linear(x, weight, packs=packs))

    return measure


def _torch_int8(shape_kn: Shape) -> float:
    k, n = shape_kn
    x = torch.randint(-127, 127, (ROWS, k), dtype=torch.int8)
    weight = torch.randint(-127, 127, (n, k), dtype=torch.int8)
    return _rate(shape_kn, lambda: torch._int_mm(x, weight.t()))


def _free(kind: str) -> Callable[[Shape], float]:
    def measure(shape_kn: Shape) -> float:
        product = FreeProduct(kind, ROWS, *shape_kn)
        return _rate(shape_kn, product.run)

    return measure


def _operands(shape_kn: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    k, n = shape_kn
    return torch.randn(ROWS, k).to(dtype), torch.randn(n, k).to(dtype)


def _rate(shape_kn: Shape, action: Callable[[], Any]) -> float:
    k, n = shape_kn
    with torch.no_grad():
        return 2 * ROWS * k * n / _best(action)


def _best(action: Callable[[], Any]) -> float:
    action()
    seconds = []
    for _ in range(REPEATS):
        start = perf_counter()
        action()
        seconds.append(perf_counter() - start)
    return min(seconds)


def load(args: argparse.Namespace) -> Mapping[str, Handler]:
    return {"limits": Machine(args.threads).limits}


if __name__ == "__main__":
    serve(load)
