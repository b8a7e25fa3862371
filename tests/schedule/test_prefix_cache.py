"""What the radix tree finds, what it evicts, and that namespaces never mix."""

from __future__ import annotations

from lockstep.schedule.blocks import BlockPool
from lockstep.schedule.prefix_cache import RadixCache


def insert_path(cache, pool, tokens, *, namespace=None) -> list[int]:
    """Insert whole blocks of 2 tokens and give the references back, deepest first."""
    node, blocks = cache.root, []
    for start in range(0, len(tokens), 2):
        (block,) = pool.allocate(1)
        node = cache.insert(node, tokens[start : start + 2], block, namespace=namespace)
        blocks.append(block)
    for block in reversed(blocks):
        pool.release(block)
    return blocks


def test_match_is_the_longest_prefix_in_whole_blocks():
    pool = BlockPool(8)
    cache = RadixCache(pool, block_size=2)
    blocks = insert_path(cache, pool, [1, 2, 3, 4, 5, 6])
    assert [node.block for node in cache.match([1, 2, 3, 4, 5])] == blocks[:2]
    assert [node.block for node in cache.match([1, 2, 3, 4, 5, 6, 7])] == blocks
    assert cache.match([1, 3, 3, 4]) == []
    assert cache.match([1]) == []


def test_the_same_tokens_after_another_prefix_are_another_block():
    pool = BlockPool(8)
    cache = RadixCache(pool, block_size=2)
    first = insert_path(cache, pool, [1, 2, 9, 9])
    second = insert_path(cache, pool, [3, 4, 9, 9])
    assert cache.match([3, 4, 9, 9])[1].block == second[1] != first[1]


def test_namespaces_do_not_share():
    pool = BlockPool(8)
    cache = RadixCache(pool, block_size=2)
    insert_path(cache, pool, [1, 2, 3, 4], namespace="adapter")
    assert cache.match([1, 2, 3, 4]) == []
    assert len(cache.match([1, 2, 3, 4], namespace="adapter")) == 2


def test_insert_returns_the_node_that_was_there():
    pool = BlockPool(4)
    cache = RadixCache(pool, block_size=2)
    first, second = pool.allocate(2)
    node = cache.insert(cache.root, [1, 2], first)
    assert cache.insert(cache.root, [1, 2], second) is node
    assert node.block == first


def test_eviction_takes_the_least_recently_used_leaf_and_keeps_the_trunk():
    pool = BlockPool(3)
    cache = RadixCache(pool, block_size=2)
    trunk, leaf, deeper = insert_path(cache, pool, [1, 2, 3, 4, 5, 6])
    cache.make_room(1)
    assert [node.block for node in cache.match([1, 2, 3, 4, 5, 6])] == [trunk, leaf]
    assert pool.allocate(1) == [deeper]
    assert not cache.can_make_room(3)
    cache.make_room(2)
    assert cache.match([1, 2]) == []
    assert len(cache) == 0


def test_clear_forgets_but_leaves_used_blocks_with_their_owner():
    pool = BlockPool(4)
    cache = RadixCache(pool, block_size=2)
    insert_path(cache, pool, [1, 2, 3, 4])
    (used,) = pool.allocate(1)
    root = cache.root
    node = cache.insert(root, [7, 8], used)
    cache.clear()
    assert cache.match([7, 8]) == []
    assert not node.is_attached
    assert not root.is_attached
    assert (pool.num_free, pool.num_used, pool.num_cached) == (3, 1, 0)
