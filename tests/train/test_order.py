from __future__ import annotations

import pytest

from lockstep.train.order import DataOrder, shuffled


def test_an_epoch_visits_every_document_once_in_batches_that_end_with_it() -> None:
    order = DataOrder(num_documents=10, batch_size=4, seed=1)
    batches = [order.next_batch() for _ in range(2 * order.batches_per_epoch)]
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2]
    first, second = ([i for batch in epoch for i in batch] for epoch in (batches[:3], batches[3:]))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


@pytest.mark.parametrize("steps", range(7))
def test_a_restored_order_goes_on_where_it_was(steps: int) -> None:
    order = DataOrder(num_documents=10, batch_size=4, seed=1)
    for _ in range(steps):
        order.next_batch()
    other = DataOrder(num_documents=10, batch_size=4, seed=1)
    other.restore(order.state())
    assert [other.next_batch() for _ in range(5)] == [order.next_batch() for _ in range(5)]


def test_the_shuffle_is_a_fact_and_not_a_library_version() -> None:
    assert shuffled(8, seed=0, epoch=0) == PINNED
    assert shuffled(8, seed=0, epoch=1) != PINNED
    assert shuffled(8, seed=1, epoch=0) != PINNED


PINNED = [0, 4, 2, 3, 7, 6, 5, 1]
