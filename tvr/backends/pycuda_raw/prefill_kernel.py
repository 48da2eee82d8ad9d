"""A prefill kernel as it is launched: all sources have the same parameters and the same grid."""

from __future__ import annotations

import math

from torch import Tensor

from tvr.backends.pycuda_raw.launch import Gpu, Kernel, Param, float32, int32, int64, tensor
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import AttentionPrefillSpec, StepMeta

_STORE_BYTES = 16  # what a thread writes at once


def prefill_params(dtype: str) -> tuple[Param, ...]:
    """Return the parameters of `prefill.cu`, `prefill_fp32.cu` and `prefill_sm90.cu`."""
    return (
        tensor("q", dtype),
        *(tensor(name, dtype, inner=3) for name in ("k_cache", "v_cache")),
        *(tensor(name, "int32") for name in ("block_table", "seq_lens", "cu_seqlens_q")),
        tensor("out", dtype, inner=3, alignment=_STORE_BYTES),
        tensor("lse", "float32", optional=True, inner=2),
        *map(int64, ("q_token_stride", "q_head_stride", "k_block_stride", "v_block_stride")),
        int64("table_stride"),
        *map(int32, ("num_seqs", "num_kv_heads", "group_size", "block_shift")),
        float32("scale_log2"),
    )


class PrefillKernel:
    """A prefill kernel of a spec, loaded on a GPU.

    Args:
        tile_rows: (token, head) rows of a block.
        block: threads of a block.
        shared_bytes: dynamic shared memory of a block.
    """

    def __init__(
        self,
        spec: AttentionPrefillSpec,
        gpu: Gpu,
        variant: KernelVariant,
        *,
        tile_rows: int,
        block: int,
        shared_bytes: int,
    ) -> None:
        self.tile_rows = tile_rows
        self._spec = spec
        params = prefill_params(spec.dtype)
        self._kernel = Kernel(gpu, variant, params, block=block, shared_bytes=shared_bytes)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        step: StepMeta,
        scale: float,
        out: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend; the numbers in `step` may be bounds of what its tensors say."""
        if step.num_tokens == 0:
            return
        spec = self._spec
        # A part of a tile for each sequence at most: see prefill_work.cuh.
        num_slots = step.num_tokens * spec.group_size // self.tile_rows + step.num_seqs
        self._kernel(
            (spec.num_kv_heads * num_slots,),
            q,
            k_cache,
            v_cache,
            step.block_table,
            step.seq_lens,
            step.cu_seqlens_q,
            out,
            lse,
            q.stride(0),
            q.stride(1),
            k_cache.stride(0),
            v_cache.stride(0),
            step.block_table.stride(0),
            step.num_seqs,
            spec.num_kv_heads,
            spec.group_size,
            spec.block_size.bit_length() - 1,
            scale * math.log2(math.e),
        )
