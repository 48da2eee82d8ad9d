"""Prefill attention: `cuda/prefill.cu` on tensor cores, `cuda/prefill_fp32.cu` for fp32.

On Hopper `prefill_sm90` takes what it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tvr.backends.pycuda_raw.launch import Gpu, Kernel, float32, int32, int64, tensor
from tvr.backends.pycuda_raw.prefill_sm90 import fits, sm90_kernel
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import AttentionPrefillSpec, BoundOp, StepMeta

#: Attends: (q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, num_seqs, num_tokens, scale,
#: out, lse). The numbers of sequences and tokens may be bounds of what the tensors say.
Launch = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, Tensor, Tensor | None], None
]


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
    # Loaded beside it: strides say which of them takes a call, and by then a graph may be in
    # capture, when nothing can be loaded.
    anywhere = mma_kernel(spec, gpu)

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
        launch: Launch = anywhere
        if hopper is not None and fits(q, k_cache, v_cache, scale):
            launch = hopper
        launch(
            q,
            k_cache,
            v_cache,
            step.block_table,
            step.seq_lens,
            step.cu_seqlens_q,
            step.num_seqs,
            step.num_tokens,
            scale,
            out,
            lse,
        )
        return out

    return BoundOp(run=run)


def mma_kernel(spec: AttentionPrefillSpec, gpu: Gpu) -> Launch:
    """Return the launcher of the kernels that serve every spec, on every SM from 80 on."""
    if spec.dtype == "float32":
        tall_rows = short_rows = _FP32_ROWS
        tall = short = _fp32_kernel(spec, gpu)
    else:
        tilings = _TALL[spec.head_dim], _SHORT[spec.head_dim]
        tall_rows, short_rows = (tiling.rows for tiling in tilings)
        tall, short = (_tiled_kernel(spec, gpu, tiling) for tiling in tilings)
    rows_to_be_tall = _TALL_BLOCKS_PER_SM * gpu.num_sms * tall_rows

    def launch(
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
        if num_tokens == 0:
            return
        is_tall = num_tokens * spec.num_heads >= rows_to_be_tall
        kernel, tile_rows = (tall, tall_rows) if is_tall else (short, short_rows)
        num_slots = num_tokens * spec.group_size // tile_rows + num_seqs  # see prefill_work.cuh
        kernel(
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

    return launch


def _tiled_kernel(spec: AttentionPrefillSpec, gpu: Gpu, tiling: Tiling) -> Kernel:
    constants = (
        ("ROW_TILES", tiling.row_tiles),
        ("TILE_KEYS", tiling.tile_keys),
        ("Q_IN_REGISTERS", tiling.q_in_registers),
        ("BLOCKS_PER_SM", tiling.blocks_per_sm),
    )
    variant = KernelVariant(
        source="prefill", dtype=spec.dtype, head_dim=spec.head_dim, defines=constants
    )
    # At most 96 KB, which every SM has.
    shared_bytes = 2 * spec.head_dim * (tiling.rows + _NUM_STAGES * 2 * tiling.tile_keys)
    return _kernel(gpu, variant, shared_bytes)


def _fp32_kernel(spec: AttentionPrefillSpec, gpu: Gpu) -> Kernel:
    variant = KernelVariant(source="prefill_fp32", dtype=spec.dtype, head_dim=spec.head_dim)
    tiles = (_FP32_ROWS + _FP32_KEYS) * (spec.head_dim + 4)
    return _kernel(gpu, variant, 4 * (tiles + _FP32_ROWS * (_FP32_KEYS + 1)))


def _kernel(gpu: Gpu, variant: KernelVariant, shared_bytes: int) -> Kernel:
    """Load either source: both have these parameters."""
    params = (
        tensor("q", variant.dtype),
        tensor("k_cache", variant.dtype),
        tensor("v_cache", variant.dtype),
        tensor("block_table", "int32"),
        tensor("seq_lens", "int32"),
        tensor("cu_seqlens_q", "int32"),
        tensor("out", variant.dtype),
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
    return Kernel(gpu, variant, params, block=_BLOCK, shared_bytes=shared_bytes)
