"""Prefill attention: a program takes a tile of rows, its loop the keys they see."""

from __future__ import annotations

import math

from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.backends.triton.prefill_kernels import prefill_kernel
from tvr.contract import AttentionPrefillSpec, BoundOp, StepMeta

HOPPER = 90


def bind_attention_prefill(spec: AttentionPrefillSpec, gpu: Gpu) -> BoundOp:
    config = _config(spec, gpu)
    width = _width(spec.head_dim)
    # By the sign of the scale.
    kernels = {
        sign: Kernel(gpu, prefill_kernel, config, SIGN=sign, HEAD_DIM=spec.head_dim, WIDTH=width)
        for sign in (1, 0, -1)
    }
    rows = config.blocks["ROWS"]
    block_shift = spec.block_size.bit_length() - 1

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

        k and v are in the cache already, and are read from there. The numbers in `step` may be
        bounds of what its tensors say.
        """
        if step.num_tokens == 0:
            return out
        # A part of a tile for each sequence at most: see first_slot.
        num_slots = step.num_tokens * spec.group_size // rows + step.num_seqs
        kernels[(scale > 0) - (scale < 0)](
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
            block_shift,
            (abs(scale) or 1.0) * math.log2(math.e),
        )
        return out

    return BoundOp(run=run)


def _width(head_dim: int) -> int:
    """Return the next power of two, which is how wide Triton's tiles can be."""
    return 1 << (head_dim - 1).bit_length()


def _config(spec: AttentionPrefillSpec, gpu: Gpu) -> Config:
    """Return the tiling; its KEYS alone decide in which order a row's sums are taken."""
    return tuned(
        "attention_prefill",
        gpu.sm,
        _default(spec.dtype, _width(spec.head_dim), gpu.sm),
        dtype=spec.dtype,
        head_dim=spec.head_dim,
    )


def _default(dtype: str, width: int, sm: int) -> Config:
    """Return tiles whose numbers fit in the registers."""
    if dtype == "float32":
        return Config(num_warps=8, num_stages=1, blocks={"ROWS": 32, "KEYS": 32})
    if width == 256:
        return Config(num_warps=8, num_stages=2, blocks={"ROWS": 64, "KEYS": 32})
    # Hopper's tensor cores read keys and values from shared memory, others' from registers.
    keys = 64 if width <= 64 or sm == HOPPER else 32
    return Config(num_warps=8, num_stages=3, blocks={"ROWS": 128, "KEYS": keys})
