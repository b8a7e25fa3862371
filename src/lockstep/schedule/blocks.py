"""Who holds which block of the KV cache.

A block is `block_size` consecutive token positions of one sequence, in every layer; it is known
here by its number only. Each block is in exactly one of three states:

    free     nobody refers to it, its contents are worthless
    used     one or more sequences refer to it
    cached   nobody refers to it, but the prefix cache can still find its contents; the least
             recently used of these is the next to be evicted

so that free + used + cached == total at all times. The pool does not know what is in a block, and
never evicts by itself: `RadixCache` does, since it must forget the contents at the same moment.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Reference counts, the free list, and the least-recently-used order of cached blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._num_total = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._references: dict[int, int] = {}
        self._kept: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_total(self) -> int:
        return self._num_total

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._references)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def num_references(self, block: int) -> int:
        return self._references.get(block, 0)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def least_recently_used(self) -> int:
        """The cached block to evict next."""
        return next(iter(self._cached))

    def can_allocate(self, count: int) -> bool:
        return count <= self.num_free

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks, each now referred to once."""
        assert self.can_allocate(count)
        blocks = [self._free.pop() for _ in range(count)]
        self._references.update(dict.fromkeys(blocks, 1))
        return blocks

    def acquire(self, block: int) -> None:
        """One more reference to a used or cached block."""
        if block in self._cached:
            del self._cached[block]
            self._references[block] = 1
        else:
            self._references[block] += 1

    def release(self, block: int) -> None:
        """One reference less; the last one makes the block cached (most recently used) or free."""
        self._references[block] -= 1
        if self._references[block]:
            return
        del self._references[block]
        if block in self._kept:
            self._cached[block] = None
        else:
            self._free.append(block)

    def keep(self, block: int) -> None:
        """The contents of this used block can be found: do not free it with its last reference."""
        assert block in self._references
        self._kept.add(block)

    def forget(self, block: int) -> None:
        """The contents of this kept block can no longer be found."""
        self._kept.remove(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)
