"""Prefill attention: `cuda/prefill.cu` on tensor cores, `cuda/prefill_fp32.cu` for fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tvr.backends.pycuda_raw.launch import Gpu, Kernel, Param, float32, int32, int64, tensor
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import AttentionPrefillSpec, BoundOp, StepMeta

#: Attends: (q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, num_seqs, num_tokens, scale,
#: out, lse). All numbers on the host may be bounds.
Launch = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, Tensor, Tensor | None], None
]

_BLOCK = 128
_NUM_STAGES = 2


@dataclass(frozen=True)
class Tiling:
    """How `prefill.cu` cuts up its work; the source explains the constants.

    Attributes:
        row_tiles, tile_keys, q_in_registers, blocks_per_sm: its -D constants.
    """

    row_tiles: int
    tile_keys: int
    q_in_registers: int
    blocks_per_sm: int

    @property
    def rows(self) -> int:
        """(token, head) rows of a block."""
        return 64 * self.row_tiles

    def variant(self, dtype: str, head_dim: int) -> KernelVariant:
        return KernelVariant(
            source="prefill",
            dtype=dtype,
            head_dim=head_dim,
            defines=(
                ("ROW_TILES", self.row_tiles),
                ("TILE_KEYS", self.tile_keys),
                ("Q_IN_REGISTERS", self.q_in_registers),
                ("BLOCKS_PER_SM", self.blocks_per_sm),
            ),
        )

    def shared_bytes(self, head_dim: int) -> int:
        """Bytes of the queries and of two stages of keys and values: at most 99 KB (sm_120)."""
        return 2 * head_dim * (self.rows + _NUM_STAGES * 2 * self.tile_keys)


#: By head_dim, as many rows as the registers hold. A head_dim has one `tile_keys` everywhere, since
#: the order in which a row's sums are taken follows from it and from nothing else.
_TALL = {
    64: Tiling(2, 64, 0, 3),
    80: Tiling(2, 64, 0, 2),
    96: Tiling(2, 64, 0, 2),
    128: Tiling(2, 64, 0, 2),
    256: Tiling(1, 32, 0, 2),
}

#: Half as many rows, for steps of too few tokens to fill the device.
_SHORT = {
    64: Tiling(1, 64, 1, 4),
    80: Tiling(1, 64, 1, 3),
    96: Tiling(1, 64, 1, 3),
    128: Tiling(1, 64, 1, 2),
    256: Tiling(1, 32, 0, 2),
}

#: Blocks of the tall tiling that an SM should have before it is worth it.
_TALL_BLOCKS_PER_SM = 2

_FP32_ROWS = 32
_FP32_KEYS = 32


def prefill_variants(dtype: str, head_dim: int) -> tuple[KernelVariant, ...]:
    """Return the kernels that prefill attention is bound to, on every SM."""
    if dtype == "float32":
        return (_fp32_variant(head_dim),)
    tilings = dict.fromkeys((_TALL[head_dim], _SHORT[head_dim]))
    return tuple(tiling.variant(dtype, head_dim) for tiling in tilings)


def bind_attention_prefill(spec: AttentionPrefillSpec, gpu: Gpu) -> BoundOp:
    launch = mma_kernel(spec, gpu)

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
    """Return the launcher of the kernels that run on every SM from 80 on."""
    dtype, head_dim = spec.dtype, spec.head_dim
    if dtype == "float32":
        fp32 = _fp32_kernel(spec, gpu)
        return lambda *args: _launch(spec, fp32, _FP32_ROWS, *args)
    tall, short = _TALL[head_dim], _SHORT[head_dim]
    kernels = {
        tiling: Kernel(
            gpu,
            tiling.variant(dtype, head_dim),
            _params(dtype),
            block=_BLOCK,
            shared_bytes=tiling.shared_bytes(head_dim),
        )
        for tiling in dict.fromkeys((tall, short))
    }
    rows_to_be_tall = _TALL_BLOCKS_PER_SM * gpu.num_sms * tall.rows

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
        tiling = tall if num_tokens * spec.num_heads >= rows_to_be_tall else short
        _launch(
            spec,
            kernels[tiling],
            tiling.rows,
            q,
            k_cache,
            v_cache,
            block_table,
            seq_lens,
            cu_seqlens_q,
            num_seqs,
            num_tokens,
            scale,
            out,
            lse,
        )

    return launch


def _launch(
    spec: AttentionPrefillSpec,
    kernel: Kernel,
    tile_rows: int,
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
    """Launch a kernel whose blocks have `tile_rows` rows: see `cuda/prefill_work.cuh`."""
    if num_tokens == 0:
        return
    num_slots = num_tokens * spec.group_size // tile_rows + num_seqs
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


def _fp32_variant(head_dim: int) -> KernelVariant:
    return KernelVariant(source="prefill_fp32", dtype="float32", head_dim=head_dim)


def _fp32_kernel(spec: AttentionPrefillSpec, gpu: Gpu) -> Kernel:
    padded = spec.head_dim + 4
    shared_bytes = 4 * ((_FP32_ROWS + _FP32_KEYS) * padded + _FP32_ROWS * (_FP32_KEYS + 1))
    return Kernel(
        gpu,
        _fp32_variant(spec.head_dim),
        _params("float32"),
        block=_BLOCK,
        shared_bytes=shared_bytes,
    )


def _params(dtype: str) -> tuple[Param, ...]:
    """Return the parameters that both sources have."""
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
        int32("log2_block_size"),
        float32("scale_log2"),
    )
