"""The thread pool: it does the work whatever its size, and costs nothing when there is none."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from lockstep import kernels
from lockstep.kernels.silu_mul import silu_mul


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = kernels.num_threads()
    kernels.set_num_threads(2)
    yield
    kernels.set_num_threads(before)


def _wake_the_pool() -> torch.Tensor:
    return silu_mul(torch.ones(200_000), torch.ones(200_000))


@pytest.mark.usefixtures("two_threads")
def test_an_idle_pool_uses_no_processor_time():
    _wake_the_pool()
    kernels.expect_work()
    time.sleep(0.05)  # spinning and yielding are over after a few milliseconds
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.02


@pytest.mark.usefixtures("two_threads")
def test_parked_workers_come_back_for_work_and_for_its_announcement():
    expected = _wake_the_pool()
    for pause in (0.0, 0.001, 0.01, 0.05):
        for announce in (False, True):
            time.sleep(pause)
            if announce:
                kernels.expect_work()
            assert torch.equal(_wake_the_pool(), expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(two_threads, threads, normal):
    gate, up = normal(300_001), normal(300_001)
    expected = silu_mul(gate, up)
    kernels.set_num_threads(threads)
    assert torch.equal(silu_mul(gate, up), expected)
