"""Rotary position embedding, alone and with the write to the paged cache: a block a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.backends.pycuda_raw.launch import Gpu, Kernel, Param, int32, int64, tensor
from tvr.backends.pycuda_raw.threads import PACK_SIZES, shared_evenly
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import BoundOp, RopeKvWriteSpec, RopeSpec

if TYPE_CHECKING:
    from torch import Tensor

_MOST_THREADS = 512


def rope_params(dtype: str) -> tuple[Param, ...]:
    """Return the parameters of `rope.cu`."""
    return (
        *(tensor(name, dtype) for name in ("q", "k")),
        tensor("positions", "int64"),
        tensor("cos_sin_cache", "float32"),
        *(tensor(name, dtype) for name in ("q_out", "k_out")),
        *_strides("q", "k", "q_out", "k_out"),
        int64("cos_sin_stride"),
        *map(int32, ("num_heads", "num_kv_heads", "rotary_dim")),
    )


def rope_kv_write_params(dtype: str) -> tuple[Param, ...]:
    """Return the parameters of `rope_kv_write.cu`."""
    return (
        *(tensor(name, dtype) for name in ("q", "k", "v")),
        tensor("positions", "int64"),
        tensor("cos_sin_cache", "float32"),
        *(tensor(name, dtype, inner=3) for name in ("k_cache", "v_cache")),
        tensor("slot_mapping", "int64"),
        *(tensor(name, dtype) for name in ("q_out", "k_out")),
        *_strides("q", "k", "v", "q_out", "k_out"),
        *map(int64, ("cos_sin_stride", "k_block_stride", "v_block_stride")),
        *map(int32, ("num_heads", "num_kv_heads", "rotary_dim", "block_shift")),
    )


def bind_rope(spec: RopeSpec, gpu: Gpu) -> BoundOp:
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    rotary_dim = spec.rotary_dim or spec.head_dim
    kernel = Kernel(
        gpu,
        KernelVariant(source="rope", dtype=spec.dtype, head_dim=spec.head_dim),
        rope_params(spec.dtype),
        block=_threads(spec, num_heads + num_kv_heads),
    )

    def run(
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        *,
        q_out: Tensor,
        k_out: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Rotate the first `rotary_dim` channels of q and k in fp32; the others pass."""
        kernel(
            (len(q),),
            q,
            k,
            positions,
            cos_sin_cache,
            q_out,
            k_out,
            *q.stride()[:2],
            *k.stride()[:2],
            *q_out.stride()[:2],
            *k_out.stride()[:2],
            cos_sin_cache.stride(0),
            num_heads,
            num_kv_heads,
            rotary_dim,
        )
        return q_out, k_out

    return BoundOp(run=run)


def bind_rope_kv_write(spec: RopeKvWriteSpec, gpu: Gpu) -> BoundOp:
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    rotary_dim = spec.rotary_dim or spec.head_dim
    block_shift = spec.block_size.bit_length() - 1
    kernel = Kernel(
        gpu,
        KernelVariant(source="rope_kv_write", dtype=spec.dtype, head_dim=spec.head_dim),
        rope_kv_write_params(spec.dtype),
        block=_threads(spec, num_heads + 2 * num_kv_heads),
    )

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        q_out: Tensor,
        k_out: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`rope`, then `kv_write` of the rotated k and of v."""
        kernel(
            (len(q),),
            q,
            k,
            v,
            positions,
            cos_sin_cache,
            k_cache,
            v_cache,
            slot_mapping,
            q_out,
            k_out,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            *q_out.stride()[:2],
            *k_out.stride()[:2],
            cos_sin_cache.stride(0),
            k_cache.stride(0),
            v_cache.stride(0),
            num_heads,
            num_kv_heads,
            rotary_dim,
            block_shift,
        )
        return q_out, k_out

    return BoundOp(run=run)


def _strides(*names: str) -> tuple[Param, ...]:
    """Return the parameters for the strides of tokens and of heads."""
    return tuple(int64(f"{name}_{dim}_stride") for name in names for dim in ("token", "head"))


def _threads(spec: RopeSpec, heads: int) -> int:
    """Return the threads of a token: each turns 16 bytes of channels with their partners."""
    return shared_evenly(heads * spec.head_dim // 2 // PACK_SIZES[spec.dtype], _MOST_THREADS)
