"""C1: what else is in the batch, its size and order, and the number of threads change no bit."""

from __future__ import annotations

import random
from functools import cache

import pytest

from lockstep import kernels


@pytest.fixture(scope="module")
def answers_alone(shared_model, requests_of, answers_of):
    """Each of 32 requests on an engine of its own, one thread; computed once per model."""

    @cache
    def answers(family: str, precision: str):
        before = kernels.num_threads()
        kernels.set_num_threads(1)
        model = shared_model(family, precision)
        alone = [answers_of(model, [request])[0] for request in requests_of(32)]
        kernels.set_num_threads(before)
        return alone

    return answers


def test_neighbours_and_threads_change_nothing(
    family, precision, threads, shared_model, requests_of, answers_of, answers_alone
):
    model, requests = shared_model(family, precision), requests_of(32)
    alone = answers_alone(family, precision)
    rng = random.Random(5)
    for size in (1, 2, 3, 5, 8, 17, 32):
        chosen = rng.sample(range(32), size)
        together = answers_of(model, [requests[i] for i in chosen])
        assert together == [alone[i] for i in chosen], f"batch of {size}"
