"""Finds blocks of the KV cache by the tokens they were computed from.

A radix tree with one node a block: the path from the root spells the tokens, a node holds the block
with the keys and values of the last `block_size` of them. Keys and values depend on everything
before them and on the weights, hence on the whole path, and on an opaque `namespace` (an adapter, a
salt) that is part of every node's key. Only blocks whose every position is computed are inserted.

Eviction takes leaves only, the least recently used first. No search is needed for a leaf: a
sequence refers to every block on its path and releases the deepest first, so in the pool's order of
use each node comes before its parent, and the first one is a leaf.

The idea is that of SGLang's RadixAttention (Zheng et al., 2023), at block granularity.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from lockstep.schedule.blocks import BlockPool

Key = tuple[Hashable, tuple[int, ...]]


@dataclass(eq=False, slots=True)
class Node:
    """A block in the tree. Once evicted or cleared, it is detached for good."""

    key: Key
    """Namespace and the tokens of this block."""
    block: int | None
    """None for the root only."""
    parent: Node | None
    children: dict[Key, Node] = field(default_factory=dict)
    is_attached: bool = True


class RadixCache:
    """The tree of computed blocks. References are counted by the pool; eviction is decided here."""

    def __init__(self, pool: BlockPool, *, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._root = _new_root()
        self._nodes: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def root(self) -> Node:
        return self._root

    def match(self, tokens: Sequence[int], *, namespace: Hashable = None) -> list[Node]:
        """Nodes of the longest cached prefix of `tokens`, in whole blocks. Takes no references."""
        node, matched = self._root, []
        for start in range(0, len(tokens) - self._block_size + 1, self._block_size):
            child = node.children.get((namespace, tuple(tokens[start : start + self._block_size])))
            if child is None:
                break
            matched.append(child)
            node = child
        return matched

    def insert(
        self, parent: Node, tokens: Sequence[int], block: int, *, namespace: Hashable = None
    ) -> Node:
        """The node for `tokens` after `parent`: a new one with `block`, or the one there was."""
        assert parent.is_attached
        assert len(tokens) == self._block_size
        key = (namespace, tuple(tokens))
        node = parent.children.get(key)
        if node is None:
            node = Node(key=key, block=block, parent=parent)
            parent.children[key] = node
            self._nodes[block] = node
            self._pool.keep(block)
        return node

    def can_make_room(self, count: int) -> bool:
        """Whether evicting can bring the number of free blocks to `count`."""
        return count <= self._pool.num_free + self._pool.num_cached

    def make_room(self, count: int) -> None:
        """Evict the least recently used leaves until `count` blocks are free."""
        assert self.can_make_room(count)
        while self._pool.num_free < count:
            self._evict(self._nodes[self._pool.least_recently_used()])

    def clear(self) -> None:
        """Forget everything. Blocks in use stay with their sequences, but are no longer found."""
        for block, node in self._nodes.items():
            node.is_attached = False
            self._pool.forget(block)
        self._nodes.clear()
        self._root.is_attached = False
        self._root = _new_root()

    def _evict(self, node: Node) -> None:
        assert node.block is not None
        assert node.parent is not None
        assert not node.children
        node.is_attached = False
        del node.parent.children[node.key]
        del self._nodes[node.block]
        self._pool.forget(node.block)


def _new_root() -> Node:
    return Node(key=(None, ()), block=None, parent=None)
