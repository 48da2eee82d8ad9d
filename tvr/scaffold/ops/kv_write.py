"""`kv_write`: store each new token's keys and values in its slot of the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.contract import BoundOp, Box, KvWriteSpec

if TYPE_CHECKING:
    from torch import Tensor

# No "cuda_graph": how many rows are kept is known on the device only, and the host waits for it.
BOXES = [
    Box(
        dtypes=("float32", "float16", "bfloat16"),
        devices=("cpu", "cuda"),
        flags=frozenset({"deterministic"}),
    )
]


def bind(spec: KvWriteSpec) -> BoundOp:
    """Return the op for heads of `spec.head_dim`; a kernel would be compiled here."""
    return BoundOp(run=run)


def run(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k, v [T, KVH, D]; caches [blocks, KVH, block_size, D]; slot_mapping [T] int64.

    Slot s is token s % block_size of block s // block_size. A row of slot -1 is left out, not
    written elsewhere: as an index, -1 would be the last slot.
    """
    block_size = k_cache.shape[2]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block, offset = slots // block_size, slots % block_size
    k_cache[block, :, offset] = k[kept]  # [kept rows, KVH, D]
    v_cache[block, :, offset] = v[kept]
