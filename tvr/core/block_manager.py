"""The pool of KV blocks: who owns which, and which of them hold a known prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from tvr.core.prefix_cache import BlockKey
from tvr.errors import CapacityError, ConfigError


class BlockCounts(NamedTuple):
    """Every block is in exactly one of these states; they sum to the size of the pool.

    Attributes:
        free: unused and empty.
        cached: unused, holding a known prefix; taken, oldest first, when `free` is empty.
        used: owned by at least one sequence.
        held: owned by none, but a step in flight may still touch it.
    """

    free: int
    cached: int
    used: int
    held: int


class PrefixHit(NamedTuple):
    """The longest cached prefix.

    Attributes:
        block_ids: its blocks, first to last; not yet acquired.
        last_key: key of the last of them, or the root.
        missing_key: key of the block after them; None if the tokens end there.
    """

    block_ids: list[int]
    last_key: BlockKey
    missing_key: BlockKey | None


class BlockManager:
    """Reference counts over `num_blocks` blocks and a prefix cache over the full ones.

    It moves no data. Allocating and freeing a block takes constant time.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens in a block.
        enable_prefix_caching: keep full blocks findable by their content.

    Raises:
        ConfigError: a size below 1.
    """

    def __init__(
        self, num_blocks: int, block_size: int = 16, *, enable_prefix_caching: bool = True
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ConfigError(f"{name} = {value}: must be at least 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 goes first
        self._ref_counts = [0] * num_blocks
        self._hold_counts: dict[int, int] = {}
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._block_of_key: dict[BlockKey, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # unowned, least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give out, empty or cached."""
        return len(self._free) + len(self._cached)

    def counts(self) -> BlockCounts:
        """Count the blocks by state; walks the pool, so it is for tests and reports."""
        held = sum(self._ref_counts[block] == 0 for block in self._hold_counts)
        used = self.num_blocks - self._ref_counts.count(0)
        return BlockCounts(len(self._free), len(self._cached), used, held)

    def ref_count(self, block: int) -> int:
        """Return how many sequences own `block`."""
        return self._ref_counts[block]

    def is_unused(self, block: int) -> bool:
        """Whether `block` counts among `num_free`."""
        return self._ref_counts[block] == 0 and block not in self._hold_counts

    def allocate(self, num: int) -> list[int]:
        """Give out `num` blocks with one reference each: empty ones first, then cached ones.

        Raises:
            CapacityError: fewer are free; nothing has changed then.
        """
        if num > self.num_free:
            raise CapacityError(
                f"{num} KV blocks asked for, {self.num_free} of {self.num_blocks} are free:"
                " release some first"
            )
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(num)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block: owned ones, held ones or hits of the prefix cache."""
        for block in block_ids:
            if self._ref_counts[block] == 0 and block not in self._hold_counts:
                del self._cached[block]  # KeyError: the block is empty, sharing it is our bug
            self._ref_counts[block] += 1

    def release(self, block_ids: list[int]) -> None:
        """Drop a reference to each block of one sequence, given in block order."""
        # Last block first: the end of a prefix is then evicted before its beginning.
        for block in reversed(block_ids):
            count = self._ref_counts[block] - 1
            assert count >= 0, f"block {block} released more often than acquired"
            self._ref_counts[block] = count
            if count == 0 and block not in self._hold_counts:
                self._put_back(block)

    def hold(self, block_ids: Iterable[int]) -> None:
        """Keep each block out of circulation, whatever its references, until `unhold`."""
        for block in block_ids:
            self._hold_counts[block] = self._hold_counts.get(block, 0) + 1

    def unhold(self, block_ids: list[int]) -> None:
        """Undo one `hold` of each block, given in block order."""
        for block in reversed(block_ids):
            self._hold_counts[block] -= 1
            if self._hold_counts[block] == 0:
                del self._hold_counts[block]
                if self._ref_counts[block] == 0:
                    self._put_back(block)

    def lookup(self, token_ids: list[int], salt: str | None = None) -> PrefixHit:
        """Find the longest cached prefix of `token_ids`, leaving at least one token to compute."""
        blocks: list[int] = []
        key = BlockKey.root(salt)
        if self.enable_prefix_caching:
            size = self.block_size
            for start in range(0, (len(token_ids) - 1) // size * size, size):
                wanted = BlockKey.of(key, token_ids[start : start + size])
                block = self._block_of_key.get(wanted)
                if block is None:
                    return PrefixHit(blocks, key, wanted)
                blocks.append(block)
                stored = self._keys[block]
                assert stored is not None
                key = stored  # the cache's own key as parent keeps the next comparison short
        return PrefixHit(blocks, key, None)

    def is_cached(self, key: BlockKey | None) -> bool:
        """Whether a block of that content can be found."""
        return key in self._block_of_key

    def publish(self, block: int, parent: BlockKey, tokens: list[int]) -> BlockKey:
        """Make an owned, fully written block findable; return the cache's key of its content.

        If another block holds the same content already, that one stays the findable one.
        """
        key = BlockKey.of(parent, tokens)
        known = self._block_of_key.setdefault(key, block)
        if known == block and self._keys[block] is None:
            self._keys[block] = key
        stored = self._keys[known]
        assert stored is not None
        return stored

    def _put_back(self, block: int) -> None:
        if self._keys[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def _evict(self) -> int:
        """Take the least recently used cached block and forget its content."""
        block, _ = self._cached.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._block_of_key[key]
        self._keys[block] = None
        return block
