"""How many threads share a row."""

from __future__ import annotations

_WARP = 32

#: Elements in 16 bytes, the most that a thread moves at once.
PACK_SIZES = {"float32": 4, "float16": 8, "bfloat16": 8}


def num_packs(elements: int, dtype: str) -> int:
    """Return the packs of 16 bytes that hold so many elements; the last may be part full."""
    return -(-elements // PACK_SIZES[dtype])


def shared_evenly(items: int, most: int) -> int:
    """Return the threads of a block, whole warps, that take `items` in equal rounds.

    Args:
        items: pieces of work of a block, at least 1.
        most: threads of a block at most, a multiple of 32. There are as few rounds as these need.
    """
    rounds = -(-items // most)
    threads = -(-items // rounds)
    return -(-threads // _WARP) * _WARP
