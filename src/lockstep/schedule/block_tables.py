"""Gives sequences their blocks: shared ones from the prefix cache, fresh ones from the pool.

Each `can_x` is a pure question, and true is the precondition of `x`. A sequence gets the blocks of
all its known tokens at admission, so that only decoding ever has to ask for more.
"""

from __future__ import annotations

from array import array

from lockstep.schedule.blocks import BlockPool
from lockstep.schedule.prefix_cache import Node, RadixCache
from lockstep.schedule.sequence import ScheduledSequence


class BlockTables:
    """Allocation for sequences. Holds the pool and the prefix cache, not the sequences."""

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_cache: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = RadixCache(self.pool, block_size=block_size)
        self._block_size = block_size
        self._enable_prefix_cache = enable_prefix_cache

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def can_allocate(self, sequence: ScheduledSequence, *, reserve: int = 0) -> bool:
        """Whether all its known tokens find room, with `reserve` blocks to spare."""
        shared = self._shareable(sequence)
        num_revived = sum(self.pool.is_cached(block) for _, block in shared)
        num_fresh = self.num_blocks_for(len(sequence.tokens)) - len(shared)
        return self.cache.can_make_room(num_fresh + num_revived + reserve)

    def allocate(self, sequence: ScheduledSequence) -> None:
        """Share the cached prefix and take fresh blocks for the rest of the known tokens."""
        assert not sequence.blocks
        shared = self._shareable(sequence)
        for _, block in shared:
            self.pool.acquire(block)
        num_fresh = self.num_blocks_for(len(sequence.tokens)) - len(shared)
        self.cache.make_room(num_fresh)
        sequence.blocks = array("i", [block for _, block in shared])
        sequence.blocks.extend(self.pool.allocate(num_fresh))
        sequence.num_computed = len(shared) * self._block_size
        sequence.num_published = len(shared)
        sequence.cached_path = shared[-1][0] if shared else self.cache.root

    def has_room(self, sequence: ScheduledSequence) -> bool:
        """Whether its newest token lies in a block it already has."""
        return len(sequence.tokens) <= len(sequence.blocks) * self._block_size

    def can_grow(self, sequence: ScheduledSequence) -> bool:
        """Whether a running sequence has, or can get, room for its newest token."""
        return self.cache.can_make_room(self._num_missing(sequence))

    def grow(self, sequence: ScheduledSequence) -> None:
        num_missing = self._num_missing(sequence)
        self.cache.make_room(num_missing)
        sequence.blocks.extend(self.pool.allocate(num_missing))

    def publish(self, sequence: ScheduledSequence) -> None:
        """Put blocks that have become full into the prefix cache.

        Where the cache already has a block for the same tokens (two sequences computed them at the
        same time) the sequence changes over to it: the contents are the same to the bit, and a
        sequence then refers to every block on its path, which `RadixCache` relies on.
        """
        num_full = sequence.num_computed // self._block_size
        if num_full == sequence.num_published:
            return
        node = sequence.cached_path
        if not self._enable_prefix_cache or node is None or not node.is_attached:
            return
        for index in range(sequence.num_published, num_full):
            tokens = sequence.tokens[index * self._block_size : (index + 1) * self._block_size]
            mine = sequence.blocks[index]
            node = self.cache.insert(node, tokens, mine, namespace=sequence.spec.namespace)
            if node.block is not None and node.block != mine:
                self.pool.acquire(node.block)
                self.pool.release(mine)
                sequence.blocks[index] = node.block
            sequence.cached_path = node
            sequence.num_published = index + 1

    def release(self, sequence: ScheduledSequence) -> None:
        """Give all blocks back, deepest first (see `RadixCache`), and forget what was computed."""
        for block in reversed(sequence.blocks):
            self.pool.release(block)
        sequence.blocks = array("i")
        sequence.num_computed = 0
        sequence.num_published = 0
        sequence.cached_path = None

    def _shareable(self, sequence: ScheduledSequence) -> list[tuple[Node, int]]:
        """Cached nodes it can use."""
        if not self._enable_prefix_cache:
            return []
        num_whole = sequence.num_shareable // self._block_size
        nodes = self.cache.match(
            sequence.tokens[: num_whole * self._block_size], namespace=sequence.spec.namespace
        )
        return [(node, node.block) for node in nodes if node.block is not None]

    def _num_missing(self, sequence: ScheduledSequence) -> int:
        return max(self.num_blocks_for(len(sequence.tokens)) - len(sequence.blocks), 0)
