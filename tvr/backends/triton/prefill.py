"""Prefill attention: a program takes a tile of rows, its loop the keys they see."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.backends.triton.prefill_kernels import prefill_kernel
from tvr.contract import AttentionPrefillSpec, BoundOp, StepMeta

HOPPER, INTERPRETER = 90, 0

#: The copy engine starts at multiples of this.
_COPY_BYTES = 16


def bind_attention_prefill(spec: AttentionPrefillSpec, gpu: Gpu) -> BoundOp:
    config = _config(spec, gpu)
    rows, keys = config.blocks["ROWS"], config.blocks["KEYS"]
    width = triton.next_power_of_2(spec.head_dim)  # tiles are so wide
    describes = config.blocks["SOURCES"] == 2 and width == spec.head_dim
    tiles = {name: size for name, size in config.blocks.items() if name != "SOURCES"}
    kernels = {
        (sign, new): Kernel(
            gpu,
            prefill_kernel,
            replace(config, blocks=tiles),
            SIGN=sign,
            HEAD_DIM=spec.head_dim,
            WIDTH=width,
            NEW=new,
        )
        for sign in (1, 0, -1)
        for new in (False, True)
    }
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
        """A chunk of new tokens a sequence: q, out [T, H, D]; k, v [T, KVH, D]; lse [T, H] fp32.

        k and v are in the cache already, and are read from either place. The numbers in `step` may
        be bounds of what its tensors say.
        """
        if step.num_tokens == 0:
            return out
        new = describes and _can_be_described(k) and _can_be_described(v)
        # A part of a tile for each sequence at most: see first_slot.
        num_slots = step.num_tokens * spec.group_size // rows + step.num_seqs
        kernels[(scale > 0) - (scale < 0), new](
            (spec.num_kv_heads * num_slots,),
            q,
            _descriptor(k, keys) if new else None,
            _descriptor(v, keys) if new else None,
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


def _can_be_described(x: Tensor) -> bool:
    """Return whether the heads of x [T, KVH, D] lie side by side, in rows a copy can start at."""
    return (
        x.stride(1) == x.shape[2]
        and x.stride(0) > 0
        and x.stride(0) * x.element_size() % _COPY_BYTES == 0
        and x.data_ptr() % _COPY_BYTES == 0
    )


def _descriptor(x: Tensor, keys: int) -> Any:  # noqa: ANN401
    """Describe x [T, KVH, D] for the GPU's copy engine, in tiles of `keys` tokens of a head."""
    num_tokens, num_heads, head_dim = x.shape
    return TensorDescriptor(
        x, [num_tokens, num_heads * head_dim], [x.stride(0), 1], [keys, head_dim]
    )


def _config(spec: AttentionPrefillSpec, gpu: Gpu) -> Config:
    """Return the tiling; its KEYS alone decide in which order a row's sums are taken.

    SOURCES is 1 if keys and values are all read from the cache, and 2 if this step's are read from
    k and v, which takes a copy engine for tiles.
    """
    return tuned(
        "attention_prefill",
        gpu.sm,
        _default(spec.dtype, triton.next_power_of_2(spec.head_dim), gpu.sm),
        dtype=spec.dtype,
        head_dim=spec.head_dim,
    )


def _default(dtype: str, width: int, sm: int) -> Config:
    """Return tiles whose numbers fit in the registers."""

    def config(num_warps: int, num_stages: int, *blocks: int) -> Config:
        names = ("ROWS", "KEYS", "LAG", "SOURCES")
        return Config(num_warps, num_stages, dict(zip(names, blocks, strict=True)))

    if dtype == "float32":
        return config(8, 1, 32, 32, 1, 1)
    if sm == INTERPRETER:
        return config(4, 1, 32, 32, 2, 2)
    if width == 256:
        return config(8, 2, 64, 32, 1, 1)
    if sm == HOPPER:
        return config(8, 3, 128, 64, 1, 1) if width <= 64 else config(8, 3, 128, 64, 2, 2)
    # Other tensor cores than Hopper's read keys and values from registers.
    return config(8, 3, 128, 64 if width <= 64 else 32, 1, 1)
