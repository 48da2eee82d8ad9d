"""Rotary position embedding, alone and with the write to the paged cache."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.kv import heads_to_cache, slot_of_heads
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.contract import BoundOp, RopeKvWriteSpec, RopeSpec
from tvr.errors import KernelError

_HEADS_OF_A_PROGRAM = 8
_PAIRS_OF_A_WARP = 256  # of channels: a thread has 8


@triton.jit
def turn_heads(
    x,
    out,
    slot_at,
    head,
    num_heads,
    num_cached,
    head_stride,
    out_head_stride,
    angles,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PASSING: tl.constexpr,
):
    """Turn heads `head` [HEADS] of one token's x, as far as it has so many, and store them in out.

    `angles` is the position's row of the table: HALF cosines, then their sines. Channel i turns
    with channel i + HALF, in fp32, rounded once; channels from 2 * HALF on pass. PAIRS is HALF
    rounded up to a power of two; PASSING likewise, or 0 if no channel passes. `slot_at` [HEADS],
    unless None, is where the token's slot starts in each head; the first `num_cached` heads go
    there too. Every number is read before it is written: out may be x.
    """
    exists = (head < num_heads)[:, None]
    wide_head = tl.cast(head, tl.int64)[:, None]
    from_head, to_head = x + wide_head * head_stride, out + wide_head * out_head_stride
    pair = tl.arange(0, PAIRS)
    inside = exists & (pair < HALF)[None, :]
    first = tl.load(from_head + pair[None, :], mask=inside, other=0.0)
    second = tl.load(from_head + HALF + pair[None, :], mask=inside, other=0.0)
    # A tile, though its rows are equal: each thread reads the angles of its own pairs, from L1.
    angle = tl.broadcast_to(angles + pair[None, :], inside.shape)
    cosine = tl.load(angle, mask=inside, other=0.0)
    sine = tl.load(angle + HALF, mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    # Fused in words: left to the compiler, `rope` and `rope_kv_write` might differ in a bit.
    first = tl.fma(a, cosine, -(b * sine)).to(first.dtype)
    second = tl.fma(b, cosine, a * sine).to(second.dtype)
    tl.store(to_head + pair[None, :], first, mask=inside)
    tl.store(to_head + HALF + pair[None, :], second, mask=inside)
    if slot_at is not None:
        inside = (head < num_cached)[:, None] & (pair < HALF)[None, :]
        tl.store(slot_at[:, None] + pair[None, :], first, mask=inside)
        tl.store(slot_at[:, None] + HALF + pair[None, :], second, mask=inside)
    if PASSING > 0:
        channel = 2 * HALF + tl.arange(0, PASSING)[None, :]
        inside = exists & (channel < HEAD_DIM)
        passing = tl.load(from_head + channel, mask=inside, other=0.0)
        tl.store(to_head + channel, passing, mask=inside)
        if slot_at is not None:
            inside = (head < num_cached)[:, None] & (channel < HEAD_DIM)
            tl.store(slot_at[:, None] + channel, passing, mask=inside)


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads"])
def rope_kernel(
    q,
    k,
    positions,
    cos_sin_cache,
    q_out,
    k_out,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    q_out_token_stride,
    q_out_head_stride,
    k_out_token_stride,
    k_out_head_stride,
    cos_sin_stride,
    num_heads,
    num_kv_heads,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PASSING: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program turns HEADS heads of one token of q [T, H, D] or of k [T, KVH, D].

    positions [T] int64 are rows of cos_sin_cache [positions, 2 * HALF] fp32.
    """
    token = tl.cast(tl.program_id(0), tl.int64)
    group = tl.program_id(1)
    num_q_groups = tl.cdiv(num_heads, HEADS)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    angles = cos_sin_cache + tl.load(positions + token) * cos_sin_stride
    if group < num_q_groups:
        turn_heads(
            q + token * q_token_stride,
            q_out + token * q_out_token_stride,
            None,
            group * HEADS + tl.arange(0, HEADS),
            num_heads,
            0,
            q_head_stride,
            q_out_head_stride,
            angles,
            HEAD_DIM,
            HALF,
            PAIRS,
            PASSING,
        )
    else:
        turn_heads(
            k + token * k_token_stride,
            k_out + token * k_out_token_stride,
            None,
            (group - num_q_groups) * HEADS + tl.arange(0, HEADS),
            num_kv_heads,
            0,
            k_head_stride,
            k_out_head_stride,
            angles,
            HEAD_DIM,
            HALF,
            PAIRS,
            PASSING,
        )


@triton.jit(do_not_specialize=["num_heads", "num_kv_heads", "block_shift"])
def rope_kv_write_kernel(
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
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    q_out_token_stride,
    q_out_head_stride,
    k_out_token_stride,
    k_out_head_stride,
    cos_sin_stride,
    k_block_stride,
    v_block_stride,
    num_heads,
    num_kv_heads,
    block_shift,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PASSING: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has HEADS heads of one token of q, of k or of v [T, KVH, D].

    It turns those of q and k as `rope_kernel` does. Turned heads of k, and those of v, go to the
    token's slot of the caches [blocks, KVH, block_size, D] too, unless slot_mapping [T] int64 has
    -1. DIM is HEAD_DIM, rounded up to a power of two.
    """
    token = tl.cast(tl.program_id(0), tl.int64)
    group = tl.program_id(1)
    num_q_groups = tl.cdiv(num_heads, HEADS)
    num_kv_groups = tl.cdiv(num_kv_heads, HEADS)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    slot = tl.load(slot_mapping + token)
    num_cached = heads_to_cache(slot, num_kv_heads)
    angles = cos_sin_cache + tl.load(positions + token) * cos_sin_stride
    if group < num_q_groups:
        turn_heads(
            q + token * q_token_stride,
            q_out + token * q_out_token_stride,
            None,
            group * HEADS + tl.arange(0, HEADS),
            num_heads,
            0,
            q_head_stride,
            q_out_head_stride,
            angles,
            HEAD_DIM,
            HALF,
            PAIRS,
            PASSING,
        )
    elif group < num_q_groups + num_kv_groups:
        head = (group - num_q_groups) * HEADS + tl.arange(0, HEADS)
        turn_heads(
            k + token * k_token_stride,
            k_out + token * k_out_token_stride,
            slot_of_heads(k_cache, slot, head, k_block_stride, block_shift, HEAD_DIM),
            head,
            num_kv_heads,
            num_cached,
            k_head_stride,
            k_out_head_stride,
            angles,
            HEAD_DIM,
            HALF,
            PAIRS,
            PASSING,
        )
    else:
        head = (group - num_q_groups - num_kv_groups) * HEADS + tl.arange(0, HEADS)
        channel = tl.arange(0, DIM)[None, :]
        inside = (head < num_kv_heads)[:, None] & (channel < HEAD_DIM)
        v_at = v + token * v_token_stride + tl.cast(head, tl.int64)[:, None] * v_head_stride
        values = tl.load(v_at + channel, mask=inside, other=0.0)
        v_slot = slot_of_heads(v_cache, slot, head, v_block_stride, block_shift, HEAD_DIM)
        inside = (head < num_cached)[:, None] & (channel < HEAD_DIM)
        tl.store(v_slot[:, None] + channel, values, mask=inside)


def bind_rope(spec: RopeSpec, gpu: Gpu) -> BoundOp:
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    config = _config(spec, gpu)
    kernel = Kernel(gpu, rope_kernel, config, **_channels(spec))
    programs_of = _programs_of(config)
    programs_of_a_token = programs_of(num_heads) + programs_of(num_kv_heads)

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
        _require_int64(positions, spec)
        kernel(
            (len(q), programs_of_a_token),
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
        )
        return q_out, k_out

    return BoundOp(run=run)


def bind_rope_kv_write(spec: RopeKvWriteSpec, gpu: Gpu) -> BoundOp:
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    block_shift = spec.block_size.bit_length() - 1
    config = _config(spec, gpu)
    dim = triton.next_power_of_2(spec.head_dim)
    kernel = Kernel(gpu, rope_kv_write_kernel, config, DIM=dim, **_channels(spec))
    programs_of = _programs_of(config)
    programs_of_a_token = programs_of(num_heads) + 2 * programs_of(num_kv_heads)

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
        _require_int64(positions, spec)
        kernel(
            (len(q), programs_of_a_token),
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
            block_shift,
        )
        return q_out, k_out

    return BoundOp(run=run)


def _channels(spec: RopeSpec) -> dict[str, Any]:
    """Return how the channels of a head are shared out: those that turn and those that pass."""
    half = (spec.rotary_dim or spec.head_dim) // 2
    passing = spec.head_dim - 2 * half
    return {
        "HEAD_DIM": spec.head_dim,
        "HALF": half,
        "PAIRS": triton.next_power_of_2(half),
        "PASSING": triton.next_power_of_2(passing) if passing else 0,
    }


def _config(spec: RopeSpec, gpu: Gpu) -> Config:
    pairs = _HEADS_OF_A_PROGRAM * triton.next_power_of_2(spec.head_dim) // 2
    default = Config(
        num_warps=max(1, pairs // _PAIRS_OF_A_WARP), blocks={"HEADS": _HEADS_OF_A_PROGRAM}
    )
    return tuned(spec.op, gpu.sm, default, dtype=spec.dtype, head_dim=spec.head_dim)


def _programs_of(config: Config) -> Callable[[int], int]:
    """Return how many programs so many heads of a token take."""
    heads = config.blocks["HEADS"]
    return lambda num_heads: -(-num_heads // heads)


def _require_int64(positions: Tensor, spec: RopeSpec) -> None:
    if positions.dtype != torch.int64:
        raise KernelError(f"{spec.op}: positions are {positions.dtype}; they must be torch.int64")
