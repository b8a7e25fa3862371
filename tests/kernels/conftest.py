"""Fixtures for kernel tests: both compute dtypes, every instruction set this CPU has, seeded
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from lockstep import kernels
from lockstep.core.errors import ConfigError
from lockstep.kernels.native_library import ISAS


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once on each instruction set; skips, saying so, those this CPU lacks."""
    if kernels.missing_reason():
        pytest.fail(f"the native library is not built: {kernels.missing_reason()}")
    best = kernels.isa()
    try:
        kernels.force_isa(request.param)
    except ConfigError as error:
        pytest.skip(str(error))
    yield request.param
    kernels.force_isa(best)


@pytest.fixture
def on_each_isa() -> Iterator[Callable[[Callable[[], torch.Tensor]], dict[str, torch.Tensor]]]:
    """on_each_isa(compute) gives the result of each instruction set this CPU has."""
    best = kernels.isa()

    def run(compute: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
        results = {}
        for name, missing in kernels.isas().items():
            if not missing:
                kernels.force_isa(name)
                results[name] = compute()
        return results

    yield run
    kernels.force_isa(best)


@pytest.fixture
def normal() -> Callable[..., torch.Tensor]:
    """normal(*shape, dtype=...) draws from one seeded stream."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return draw


@pytest.fixture
def assert_close() -> Callable[..., None]:
    """assert_close(got, want): relative to the largest wanted value, by got's dtype."""

    def check(got: torch.Tensor, want: torch.Tensor, *, scale: float = 1.0) -> None:
        tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3}[got.dtype] * scale
        assert got.shape == want.shape
        error = (got.double() - want.double()).abs().max().item() if got.numel() else 0.0
        bound = tolerance * max(1.0, want.double().abs().max().item() if want.numel() else 0.0)
        assert error <= bound, f"error {error:.3g} above {bound:.3g}"

    return check
