"""Prefill attention: `cuda/prefill.cu` on tensor cores, `cuda/prefill_fp32.cu` for fp32.

On Hopper `prefill_sm90` takes what it can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tvr.backends.pycuda_raw.launch import Gpu
from tvr.backends.pycuda_raw.prefill_kernel import PrefillKernel
from tvr.backends.pycuda_raw.prefill_sm90 import fits, sm90_kernel
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import AttentionPrefillSpec, BoundOp, StepMeta

#: Returns the kernel for a step of so many tokens.
Choice = Callable[[int], PrefillKernel]


@dataclass(frozen=True)
class Tiling:
    """How `prefill.cu` cuts up its work: its -D constants, which the source explains.

    A head_dim has one `tile_keys` everywhere: the order in which a row's sums are taken follows
    from it and from nothing else, so a row has the same bits whichever tiling it falls to.
    """

    row_tiles: int
    tile_keys: int
    q_in_registers: int
    blocks_per_sm: int

    @property
    def rows(self) -> int:
        """(token, head) rows of a block."""
        return 64 * self.row_tiles


#: By head_dim, as many rows as the registers hold.
_TALL = {
    64: Tiling(2, 64, 0, 3),
    80: Tiling(2, 64, 0, 2),
    96: Tiling(2, 64, 0, 2),
    128: Tiling(2, 64, 0, 2),
    256: Tiling(1, 32, 0, 2),
}

#: Fewer rows, for steps of too few tokens to fill the device.
_SHORT = {
    64: Tiling(1, 64, 1, 4),
    80: Tiling(1, 64, 1, 3),
    96: Tiling(1, 64, 1, 3),
    128: Tiling(1, 64, 1, 2),
    256: Tiling(1, 32, 0, 2),
}

#: Blocks of the tall tiling that there should be for each SM before it is worth it.
_TALL_BLOCKS_PER_SM = 2

_BLOCK = 128
_NUM_STAGES = 2
_FP32_ROWS = 32
_FP32_KEYS = 32


def bind_attention_prefill(spec: AttentionPrefillSpec, gpu: Gpu) -> BoundOp:
    hopper = sm90_kernel(spec, gpu)
    # Loaded beside it: strides and addresses say which of them takes a call, and by then a graph
    # may be in capture, when nothing can be loaded.
    anywhere = mma_kernels(spec, gpu)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: StepMeta,
        *,
        scale: float,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> Tensor:
        """A chunk of new tokens a sequence: q, out [T, H, D]; lse [T, H] fp32.

        k and v are in the cache already, and are read from there.
        """
        if hopper is not None and fits(q, k_cache, v_cache, scale):
            kernel = hopper
        else:
            kernel = anywhere(step.num_tokens)
        kernel(q, k_cache, v_cache, step, scale, out, lse)
        return out

    return BoundOp(run=run)


def mma_kernels(spec: AttentionPrefillSpec, gpu: Gpu) -> Choice:
    """Load the kernels that serve every spec, on every SM from 80 on; return the choice of one."""
    if spec.dtype == "float32":
        only = _fp32_kernel(spec, gpu)
        return lambda num_tokens: only
    tall = _tiled_kernel(spec, gpu, _TALL[spec.head_dim])
    short = _tiled_kernel(spec, gpu, _SHORT[spec.head_dim])
    rows_to_be_tall = _TALL_BLOCKS_PER_SM * gpu.num_sms * tall.tile_rows
    return lambda num_tokens: tall if num_tokens * spec.num_heads >= rows_to_be_tall else short


def _tiled_kernel(spec: AttentionPrefillSpec, gpu: Gpu, tiling: Tiling) -> PrefillKernel:
    constants = (
        ("ROW_TILES", tiling.row_tiles),
        ("TILE_KEYS", tiling.tile_keys),
        ("Q_IN_REGISTERS", tiling.q_in_registers),
        ("BLOCKS_PER_SM", tiling.blocks_per_sm),
    )
    return PrefillKernel(
        spec,
        gpu,
        KernelVariant(
            source="prefill", dtype=spec.dtype, head_dim=spec.head_dim, defines=constants
        ),
        tile_rows=tiling.rows,
        block=_BLOCK,
        # At most 96 KB, which every SM has.
        shared_bytes=2 * spec.head_dim * (tiling.rows + _NUM_STAGES * 2 * tiling.tile_keys),
    )


def _fp32_kernel(spec: AttentionPrefillSpec, gpu: Gpu) -> PrefillKernel:
    tiles = (_FP32_ROWS + _FP32_KEYS) * (spec.head_dim + 4)
    return PrefillKernel(
        spec,
        gpu,
        KernelVariant(source="prefill_fp32", dtype=spec.dtype, head_dim=spec.head_dim),
        tile_rows=_FP32_ROWS,
        block=_BLOCK,
        shared_bytes=4 * (tiles + _FP32_ROWS * (_FP32_KEYS + 1)),
    )
