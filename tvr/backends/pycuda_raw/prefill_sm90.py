"""Prefill attention on Hopper: `cuda/prefill_sm90.cu`, for half precision and some head_dims."""

from __future__ import annotations

from torch import Tensor

from tvr.backends.pycuda_raw.launch import Gpu
from tvr.backends.pycuda_raw.prefill_kernel import PrefillKernel
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


def sm90_kernel(spec: AttentionPrefillSpec, gpu: Gpu) -> PrefillKernel | None:
    """Return the loaded kernel, or None where it does not serve: it is not for any other SM."""
    if gpu.sm != 90 or spec.dtype == "float32" or spec.head_dim not in _TILINGS:
        return None
    num_consumers, tile_keys = _TILINGS[spec.head_dim]
    tile_rows = 64 * num_consumers
    tiles = 2 * spec.head_dim * (tile_rows + 2 * _NUM_STAGES * tile_keys)
    return PrefillKernel(
        spec,
        gpu,
        KernelVariant(
            source="prefill_sm90", dtype=spec.dtype, head_dim=spec.head_dim, arch_specific=True
        ),
        tile_rows=tile_rows,
        block=_WARPGROUP * (num_consumers + 1),
        shared_bytes=tiles + _TILE_ALIGNMENT,
    )


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
