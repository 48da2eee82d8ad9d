"""Keys of cached KV blocks: a chained hash, backed by a full comparison."""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class BlockKey:
    """Names the content of one full block: its tokens and, through `parent`, all before them.

    The hash chains, so it costs one block, not one prefix. Equality compares the tokens and the
    whole chain of parents, so a hash collision is never a hit. Keys of one cache share their
    parents; the comparison then stops at the first one in common, mostly at once.
    """

    __slots__ = ("_hash", "parent", "tokens")

    def __init__(self, parent: BlockKey | None, tokens: bytes | str | None) -> None:
        self.parent = parent
        self.tokens = tokens
        self._hash = hash((parent, tokens))

    @classmethod
    def root(cls, salt: str | None) -> BlockKey:
        """Return the parent of every first block that belongs to `salt`."""
        return cls(None, salt)

    @classmethod
    def of(cls, parent: BlockKey, tokens: Sequence[int]) -> BlockKey:
        """Return the key of a block of token ids, signed 64-bit integers.

        They are kept as bytes: a large cache has a key for each of its blocks, and as Python's
        integers the tokens would take four times the memory.
        """
        return cls(parent, array("q", tokens).tobytes())

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockKey):
            return NotImplemented
        left: BlockKey | None = self
        right: BlockKey | None = other
        # A loop: a chain may be longer than Python's recursion limit.
        while left is not right:
            if left is None or right is None:
                return False
            if left._hash != right._hash or left.tokens != right.tokens:
                return False
            left, right = left.parent, right.parent
        return True
