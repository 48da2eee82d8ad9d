"""The block pool alone: counts, sharing, the prefix cache, eviction."""

from __future__ import annotations

import random

import pytest

from tvr.core import BlockKey, BlockManager
from tvr.errors import CapacityError, ConfigError

SIZE = 4
A, B, C, TAIL = [1] * SIZE, [2] * SIZE, [3] * SIZE, [9]


def publish(manager: BlockManager, tokens: list[int], salt: str | None = None) -> list[int]:
    """Allocate and publish the full blocks of `tokens`; return them, still owned."""
    blocks = manager.allocate(len(tokens) // SIZE)
    key = BlockKey.root(salt)
    for index, block in enumerate(blocks):
        key = manager.publish(block, key, tokens[index * SIZE : (index + 1) * SIZE])
    return blocks


def hits(manager: BlockManager, tokens: list[int], salt: str | None = None) -> list[int]:
    return manager.lookup(tokens, salt).block_ids


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (-1, 16)])
def test_a_pool_without_blocks_or_slots_is_refused(num_blocks, block_size):
    with pytest.raises(ConfigError, match="must be at least 1"):
        BlockManager(num_blocks, block_size)


def test_a_failed_allocation_changes_nothing():
    manager = BlockManager(4, SIZE)
    kept = manager.allocate(3)
    before = manager.counts()
    with pytest.raises(CapacityError, match=r"2 KV blocks asked for, 1 of 4"):
        manager.allocate(2)
    assert manager.counts() == before
    assert [manager.ref_count(block) for block in kept] == [1, 1, 1]


def test_a_shared_block_is_free_after_its_last_owner_only():
    manager = BlockManager(4, SIZE)
    blocks = manager.allocate(2)
    manager.acquire(blocks[:1])
    manager.release(blocks)
    assert manager.counts().used == 1
    manager.release(blocks[:1])
    assert manager.counts() == (4, 0, 0, 0)


def test_a_held_block_is_not_given_out_until_it_is_let_go():
    manager = BlockManager(2, SIZE)
    blocks = publish(manager, A + B)
    manager.hold(blocks)
    manager.hold(blocks[:1])
    manager.release(blocks)
    assert manager.counts() == (0, 0, 0, 2)
    with pytest.raises(CapacityError):
        manager.allocate(1)
    manager.unhold(blocks)
    assert manager.counts() == (0, 1, 0, 1)
    assert manager.allocate(1) == blocks[1:]
    manager.unhold(blocks[:1])
    assert manager.counts() == (0, 1, 1, 0)


def test_an_empty_block_cannot_be_shared():
    with pytest.raises(KeyError):
        BlockManager(2, SIZE).acquire([0])


def test_a_held_block_can_be_hit():
    manager = BlockManager(2, SIZE)
    blocks = publish(manager, A)
    manager.hold(blocks)
    manager.release(blocks)
    manager.acquire(hits(manager, A + TAIL))
    manager.unhold(blocks)
    assert manager.counts() == (1, 0, 1, 0)


def test_an_empty_block_is_taken_before_a_cached_one():
    manager = BlockManager(3, SIZE)
    cached = publish(manager, A)
    manager.release(cached)
    manager.allocate(2)
    assert hits(manager, A + TAIL) == cached


def test_the_least_recently_used_prefix_is_evicted_from_its_end():
    manager = BlockManager(4, SIZE)
    old, new = publish(manager, A + B), publish(manager, B + C)
    manager.release(old)
    manager.release(new)
    manager.acquire(old)  # used once more, so `new` is the older one now
    manager.release(old)
    assert manager.allocate(3) == [new[1], new[0], old[1]]
    assert hits(manager, A + B + TAIL) == old[:1]


def test_an_evicted_block_is_not_found_and_a_block_in_use_is_never_evicted():
    manager = BlockManager(3, SIZE)
    blocks = publish(manager, A + B)
    manager.acquire(blocks)
    manager.release(blocks)  # a reader remains
    manager.allocate(1)
    with pytest.raises(CapacityError):
        manager.allocate(1)
    assert [manager.ref_count(block) for block in blocks] == [1, 1]


def test_a_hole_in_the_chain_ends_the_hit():
    manager = BlockManager(3, SIZE)
    blocks = publish(manager, A + B + C)
    manager.release(blocks[:1])  # alone, so that the first block is the one to evict
    assert manager.allocate(1) == blocks[:1]
    manager.release(blocks[1:])
    assert hits(manager, A + B + C + TAIL) == []


def test_a_filled_hole_makes_the_rest_of_the_chain_found_again():
    manager = BlockManager(4, SIZE)
    blocks = publish(manager, A + B + C)
    manager.release(blocks[:1])
    manager.allocate(2)  # the empty one, then the first of the chain
    manager.release(blocks[:1])
    (again,) = publish(manager, A)
    assert hits(manager, A + B + C + TAIL) == [again, *blocks[1:]]


def test_a_full_hit_leaves_a_token_to_compute():
    manager = BlockManager(4, SIZE)
    blocks = publish(manager, A + B)
    assert hits(manager, A + B) == blocks[:1]
    assert hits(manager, A + B + TAIL) == blocks
    assert hits(manager, A) == []


def test_equal_tokens_after_another_prefix_are_no_hit():
    manager = BlockManager(4, SIZE)
    blocks = publish(manager, A + B)
    assert hits(manager, C + B + TAIL) == []
    assert hits(manager, B + TAIL) == []
    assert hits(manager, A + C + TAIL) == blocks[:1]


def test_salts_keep_caches_apart():
    manager = BlockManager(4, SIZE)
    plain, salted = publish(manager, A), publish(manager, A, salt="x")
    assert hits(manager, A + TAIL) == plain
    assert hits(manager, A + TAIL, salt="x") == salted
    assert hits(manager, A + TAIL, salt="y") == []


def test_a_hash_collision_is_no_hit(monkeypatch):
    """Even if every hash is the same, tokens and parents decide."""
    monkeypatch.setattr(BlockKey, "__hash__", lambda self: 7)
    init = BlockKey.__init__

    def same_hash(self, parent, tokens):
        init(self, parent, tokens)
        self._hash = 7

    monkeypatch.setattr(BlockKey, "__init__", same_hash)
    manager = BlockManager(8, SIZE)
    first, second = publish(manager, A + B), publish(manager, C + B)
    assert hits(manager, A + B + TAIL) == first
    assert hits(manager, C + B + TAIL) == second
    assert hits(manager, B + B + TAIL) == []
    assert hits(manager, A + C + TAIL) == first[:1]


def test_content_published_twice_is_found_once_and_leaves_no_trace():
    manager = BlockManager(4, SIZE)
    first, second = publish(manager, A + B), publish(manager, A + B)
    assert hits(manager, A + B + TAIL) == first
    manager.release(second)
    assert manager.counts() == (2, 0, 2, 0)
    manager.release(first)
    assert manager.counts() == (2, 2, 0, 0)
    manager.allocate(4)
    assert hits(manager, A + B + TAIL) == []


def test_without_prefix_caching_nothing_is_found():
    manager = BlockManager(4, SIZE, enable_prefix_caching=False)
    assert hits(manager, A + B + TAIL) == []


def test_a_chain_longer_than_the_recursion_limit_is_compared_and_freed():
    def chain() -> BlockKey:
        key = BlockKey.root(None)
        for token in range(20_000):
            key = BlockKey(key, (token,))
        return key

    first, second = chain(), chain()
    assert first == second
    assert first != BlockKey(second, (0,))
    del first, second


def test_random_use_never_loses_a_block():
    rng = random.Random(5)
    manager = BlockManager(24, SIZE)
    owned: list[list[int]] = []
    held: list[list[int]] = []
    for _ in range(4000):
        action = rng.randrange(5)
        tokens = [rng.randrange(2) for _ in range(SIZE * rng.randrange(1, 5))]
        if action == 0 and manager.num_free >= len(tokens) // SIZE:
            owned.append(publish(manager, tokens))
        elif action == 1:
            blocks = hits(manager, tokens)
            manager.acquire(blocks)
            owned.append(blocks)
        elif action == 2 and owned:
            manager.release(owned.pop(rng.randrange(len(owned))))
        elif action == 3 and owned:
            held.append(owned.pop(rng.randrange(len(owned))))
            manager.hold(held[-1])
            manager.release(held[-1])
        elif held:
            manager.unhold(held.pop(rng.randrange(len(held))))
        counts = manager.counts()
        assert sum(counts) == 24
        assert counts.used == len({block for blocks in owned for block in blocks})
        assert counts.free + counts.cached == manager.num_free
    for blocks in owned:
        manager.release(blocks)
    for blocks in held:
        manager.unhold(blocks)
    assert manager.num_free == 24
