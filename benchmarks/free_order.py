"""Products whose order of summation is free, for comparison with the contract's (comparison.c)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from compiled import comparison

Kind = Literal["bf16", "int8"]
PANEL = 64
SUM_BYTES = 4
ELEMENT_BYTES = {"bf16": 2, "int8": 1}
L2_BYTES = 768 * 1024
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a product is cut; every one gives another order of summation."""

    chains: int = 1
    """Sums of one output along K at a time."""
    splits: int = 1
    """Parts of K that different threads sum."""
    row_block: int = 96
    k_block: int = 1024
    """In 32-bit steps."""


class FreeProduct:
    """x (M, K) by `copies` matrices (N, K) in panels, with random contents; N in whole panels."""

    def __init__(self, kind: str, m: int, k: int, n: int, *, copies: int = 1) -> None:
        assert n % PANEL == 0, n
        assert k % (16 * SUM_BYTES) == 0, k
        self.kind, self.m, self.k, self.n = kind, m, k, n
        size = ELEMENT_BYTES[kind]
        self._function = getattr(comparison(), f"free_{kind}")
        self._x = _values(kind, m * k)
        self._weights = [_values(kind, n * k) for _ in range(copies)]
        self._addresses = np.array([w.ctypes.data for w in self._weights], dtype=np.uint64)
        self._y = np.zeros(m * n, dtype=np.uint32)
        self._partial = np.zeros(m * n, dtype=np.uint32)
        self.weight_bytes = n * k * size
        self.plan = Plan()

    def run(self) -> None:
        plan = self.plan
        self._function(
            self._x.ctypes.data,
            self._addresses.ctypes.data,
            len(self._weights),
            self._y.ctypes.data,
            self.m,
            self.n,
            self.k,
            plan.chains,
            plan.splits,
            plan.row_block,
            plan.k_block,
            self._partial.ctypes.data,
        )

    def plans(self) -> Iterator[Plan]:
        """Those worth trying."""
        chains: Sequence[int] = (1, 2, 4) if self.m <= 3 else (1,)
        splits = (1, 2) if self.m <= 8 else (1,)
        row_blocks = (96,) if self.m <= 96 else (48, 96, 192, 384)
        for c, s, r, k in product(chains, splits, row_blocks, (256, 1024)):
            yield Plan(chains=c, splits=s, row_block=r, k_block=k)


def _values(kind: str, count: int) -> np.ndarray:
    """bf16 numbers near 1, as words; bytes from 0 to 127."""
    generator = np.random.default_rng(SEED)
    if kind == "int8":
        return generator.integers(0, 127, count, dtype=np.uint8)
    floats = generator.standard_normal(count, dtype=np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16)
