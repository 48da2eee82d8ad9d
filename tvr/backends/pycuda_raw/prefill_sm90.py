"""Prefill attention on Hopper: `cuda/prefill_sm90.cu`, for half precision and some head_dims."""

from __future__ import annotations

import math

from torch import Tensor

from tvr.backends.pycuda_raw.launch import Gpu, Kernel, Param, float32, int32, int64, tensor
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import AttentionPrefillSpec

#: (warpgroups that multiply, 64 rows each; keys of a tile) by head_dim, as in the source.
_TILINGS = {64: (3, 128), 128: (2, 128), 256: (2, 64)}

_WARPGROUP = 128
_NUM_STAGES = 2

#: The dynamic shared memory starts where it starts, its tiles at a multiple of this.
_TILE_ALIGNMENT = 1024

#: Elements of 16 bytes, which is how everything is copied.
_CHUNK, _CHUNK_BYTES = 8, 16


def sm90_variant(dtype: str, head_dim: int) -> KernelVariant | None:
    """Return the kernel, or None where there is none."""
    if dtype == "float32" or head_dim not in _TILINGS:
        return None
    return KernelVariant(source="prefill_sm90", dtype=dtype, head_dim=head_dim, arch_specific=True)


def sm90_kernel(spec: AttentionPrefillSpec, gpu: Gpu) -> Sm90Kernel | None:
    """Return the loaded kernel, or None where it does not serve: it is not for any other SM."""
    variant = sm90_variant(spec.dtype, spec.head_dim)
    return None if variant is None or gpu.sm != 90 else Sm90Kernel(spec, gpu, variant)


def fits(q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float) -> bool:
    """Return whether the kernel can take these: rows that can be copied 16 bytes at a time.

    Wherever a row starts it is at a multiple of 16 bytes: the base and all strides are.

    A scale of 0 or less would turn the largest score into another one, or hidden ones into NaN.
    """
    strides = (*q.stride()[:2], k_cache.stride(0), v_cache.stride(0))
    bases = (q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr())
    return (
        scale > 0
        and all(stride % _CHUNK == 0 for stride in strides)
        and all(base % _CHUNK_BYTES == 0 for base in bases)
    )


class Sm90Kernel:
    """The kernel of a spec, loaded on a GPU."""

    def __init__(self, spec: AttentionPrefillSpec, gpu: Gpu, variant: KernelVariant) -> None:
        num_consumers, tile_keys = _TILINGS[spec.head_dim]
        self._spec = spec
        self._tile_rows = 64 * num_consumers
        tiles = 2 * spec.head_dim * (self._tile_rows + 2 * _NUM_STAGES * tile_keys)
        self._kernel = Kernel(
            gpu,
            variant,
            _params(spec.dtype),
            block=_WARPGROUP * (num_consumers + 1),
            shared_bytes=tiles + _TILE_ALIGNMENT,
        )

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        cu_seqlens_q: Tensor,
        num_seqs: int,
        num_tokens: int,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend; `fits` must be true. The numbers may be bounds of what the tensors say."""
        if num_tokens == 0:
            return
        spec = self._spec
        num_slots = num_tokens * spec.group_size // self._tile_rows + num_seqs
        self._kernel(
            (spec.num_kv_heads * num_slots,),
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            cu_seqlens_q,
            out,
            lse,
            q.stride(0),
            q.stride(1),
            k_cache.stride(0),
            v_cache.stride(0),
            block_table.stride(0),
            num_seqs,
            spec.num_kv_heads,
            spec.group_size,
            spec.block_size.bit_length() - 1,
            scale * math.log2(math.e),
        )


def _params(dtype: str) -> tuple[Param, ...]:
    return (
        tensor("q", dtype),
        tensor("k_cache", dtype),
        tensor("v_cache", dtype),
        tensor("block_table", "int32"),
        tensor("seq_lens", "int32"),
        tensor("cu_seqlens_q", "int32"),
        tensor("out", dtype),
        tensor("lse", "float32", optional=True),
        int64("q_token_stride"),
        int64("q_head_stride"),
        int64("k_block_stride"),
        int64("v_block_stride"),
        int64("table_stride"),
        int32("num_seqs"),
        int32("num_kv_heads"),
        int32("group_size"),
        int32("block_shift"),
        float32("scale_log2"),
    )
