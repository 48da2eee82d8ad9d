"""Store new keys and values in the slots of the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.contract import BoundOp
from tvr.errors import KernelError

if TYPE_CHECKING:
    from torch import Tensor


def bind_kv_write() -> BoundOp:
    return BoundOp(run=write_kv)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write row t of k and v [T, KVH, D] to slot `slot_mapping[t]`; -1: write nothing.

    Slot s is token `s % block_size` of block `s // block_size`. Values are rounded to the cache's
    dtype if it is another.

    Raises:
        KernelError: a slot below -1 or past the cache; nothing is written.
    """
    if slot_mapping.numel() == 0:
        return
    num_blocks, _, block_size, _ = k_cache.shape
    lowest, highest = (int(bound) for bound in torch.aminmax(slot_mapping))
    if lowest < -1 or highest >= num_blocks * block_size:
        raise KernelError(
            f"kv_write: slots span {lowest} to {highest}; the cache has {num_blocks} blocks of "
            f"{block_size}, so slots 0 to {num_blocks * block_size - 1}, and -1 for none"
        )
    if lowest == -1:
        kept = slot_mapping >= 0
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    # Block and offset index dims 0 and 2, so a cache whose blocks interleave K and V works too.
    k_cache[block, :, offset] = k.to(k_cache.dtype)  # [T, KVH, D]
    v_cache[block, :, offset] = v.to(v_cache.dtype)
