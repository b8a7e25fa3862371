"""The pool's three states and the order in which cached blocks are given up."""

from __future__ import annotations

import pytest

from lockstep.schedule.blocks import BlockPool


def counts(pool: BlockPool) -> tuple[int, int, int]:
    assert pool.num_free + pool.num_used + pool.num_cached == pool.num_total
    return pool.num_free, pool.num_used, pool.num_cached


def test_a_block_is_used_until_its_last_reference_goes():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.acquire(block)
    pool.release(block)
    assert counts(pool) == (2, 1, 0)
    pool.release(block)
    assert counts(pool) == (3, 0, 0)


def test_a_kept_block_is_cached_after_its_last_reference_and_can_be_revived():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.release(block)
    assert counts(pool) == (1, 0, 1)
    pool.acquire(block)
    assert counts(pool) == (1, 1, 0)
    assert pool.num_references(block) == 1


def test_forgetting_frees_a_cached_block_but_not_a_used_one():
    pool = BlockPool(2)
    cached, used = pool.allocate(2)
    for block in (cached, used):
        pool.keep(block)
    pool.release(cached)
    pool.forget(cached)
    pool.forget(used)
    assert counts(pool) == (1, 1, 0)
    pool.release(used)
    assert counts(pool) == (2, 0, 0)


def test_least_recently_used_is_by_last_release():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.keep(block)
        pool.release(block)
    pool.acquire(blocks[0])
    pool.release(blocks[0])
    assert pool.least_recently_used() == blocks[1]


def test_can_allocate_counts_free_blocks_only():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.keep(block)
    pool.release(block)
    assert pool.can_allocate(1)
    assert not pool.can_allocate(2)
    with pytest.raises(AssertionError):
        pool.allocate(2)
