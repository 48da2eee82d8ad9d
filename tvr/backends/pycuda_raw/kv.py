"""Store new keys and values in the slots of the paged cache: a block a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.backends.pycuda_raw.launch import Gpu, Kernel, Param, int32, int64, tensor
from tvr.backends.pycuda_raw.threads import PACK_SIZES, shared_evenly
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import BoundOp, KvWriteSpec

if TYPE_CHECKING:
    from torch import Tensor

_MOST_THREADS = 512


def kv_write_params(dtype: str) -> tuple[Param, ...]:
    """Return the parameters of `kv_write.cu`."""
    return (
        *(tensor(name, dtype) for name in ("k", "v")),
        *(tensor(name, dtype, inner=3) for name in ("k_cache", "v_cache")),
        tensor("slot_mapping", "int64"),
        *map(int64, ("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride")),
        *map(int64, ("k_block_stride", "v_block_stride")),
        *map(int32, ("num_kv_heads", "block_shift")),
    )


def bind_kv_write(spec: KvWriteSpec, gpu: Gpu) -> BoundOp:
    num_kv_heads = spec.num_kv_heads
    block_shift = spec.block_size.bit_length() - 1
    packs = num_kv_heads * spec.head_dim // PACK_SIZES[spec.dtype]
    kernel = Kernel(
        gpu,
        KernelVariant(source="kv_write", dtype=spec.dtype, head_dim=spec.head_dim),
        kv_write_params(spec.dtype),
        block=shared_evenly(packs, _MOST_THREADS),
    )

    def run(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write row t of k and v [T, KVH, D] to slot `slot_mapping[t]`; -1: write nothing."""
        kernel(
            (len(k),),
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            *k.stride()[:2],
            *v.stride()[:2],
            k_cache.stride(0),
            v_cache.stride(0),
            num_kv_heads,
            block_shift,
        )

    return BoundOp(run=run)
