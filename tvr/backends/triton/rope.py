"""Rotary position embedding, alone and with the write to the paged cache."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.kv import slot_of_heads
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.contract import BoundOp, RopeKvWriteSpec, RopeSpec
from tvr.errors import KernelError

#: Classes of steps, as the table of configurations names them.
FEW, MANY = "few", "many"
_MANY_TOKENS = 1024

_HEADS_OF_A_PROGRAM = 8
_TOKENS_OF_A_PROGRAM = 4  # where there are many
_PAIRS_OF_A_WARP = 256  # of channels: a thread has 8


@triton.jit
def turn_heads(
    x,
    out,
    slot_at,
    token,
    head,
    exists,
    is_cached,
    token_stride,
    head_stride,
    out_token_stride,
    out_head_stride,
    angles,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PASSING: tl.constexpr,
):
    """Turn some heads of some tokens' x, and store them in out: head[r] of token[r], r < R.

    token, head, exists, is_cached, slot_at and angles are [R]. `angles` is where the position's row
    of the table starts: HALF cosines, then their sines. Channel i turns with channel i + HALF, in
    fp32, rounded once; channels from 2 * HALF on pass. PAIRS is HALF rounded up to a power of two;
    PASSING likewise, or 0 if no channel passes. `slot_at`, unless None, is where the token's slot
    starts in the head; where it is_cached, the head goes there too. Every number is read before it
    is written: out may be x.
    """
    from_head = x + (token * token_stride + head * head_stride)[:, None]
    to_head = out + (token * out_token_stride + head * out_head_stride)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = exists[:, None] & (pair < HALF)
    first = tl.load(from_head + pair, mask=inside, other=0.0)
    second = tl.load(from_head + HALF + pair, mask=inside, other=0.0)
    # Each thread reads the angles of its own pairs, from L1.
    cosine = tl.load(angles[:, None] + pair, mask=inside, other=0.0)
    sine = tl.load(angles[:, None] + HALF + pair, mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    # Fused in words: left to the compiler, `rope` and `rope_kv_write` might differ in a bit.
    first = tl.fma(a, cosine, -(b * sine)).to(first.dtype)
    second = tl.fma(b, cosine, a * sine).to(second.dtype)
    tl.store(to_head + pair, first, mask=inside)
    tl.store(to_head + HALF + pair, second, mask=inside)
    if slot_at is not None:
        inside = is_cached[:, None] & (pair < HALF)
        tl.store(slot_at[:, None] + pair, first, mask=inside)
        tl.store(slot_at[:, None] + HALF + pair, second, mask=inside)
    if PASSING > 0:
        channel = 2 * HALF + tl.arange(0, PASSING)[None, :]
        inside = exists[:, None] & (channel < HEAD_DIM)
        passing = tl.load(from_head + channel, mask=inside, other=0.0)
        tl.store(to_head + channel, passing, mask=inside)
        if slot_at is not None:
            inside = is_cached[:, None] & (channel < HEAD_DIM)
            tl.store(slot_at[:, None] + channel, passing, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_heads", "num_kv_heads"])
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
    num_tokens,
    num_heads,
    num_kv_heads,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PASSING: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program turns HEADS heads of TOKENS tokens of q [T, H, D] or of k [T, KVH, D].

    positions [T] int64 are rows of cos_sin_cache [positions, 2 * HALF] fp32.
    """
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.cast(tl.program_id(0), tl.int64) * TOKENS + row // HEADS
    group = tl.program_id(1)
    num_q_groups = tl.cdiv(num_heads, HEADS)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    is_token = token < num_tokens
    angles = cos_sin_cache + tl.load(positions + token, mask=is_token, other=0) * cos_sin_stride
    if group < num_q_groups:
        head = tl.cast(group * HEADS + row % HEADS, tl.int64)
        turn_heads(
            *(q, q_out, None, token, head, is_token & (head < num_heads), is_token),
            *(q_token_stride, q_head_stride, q_out_token_stride, q_out_head_stride),
            *(angles, HEAD_DIM, HALF, PAIRS, PASSING),
        )
    else:
        head = tl.cast((group - num_q_groups) * HEADS + row % HEADS, tl.int64)
        turn_heads(
            *(k, k_out, None, token, head, is_token & (head < num_kv_heads), is_token),
            *(k_token_stride, k_head_stride, k_out_token_stride, k_out_head_stride),
            *(angles, HEAD_DIM, HALF, PAIRS, PASSING),
        )


@triton.jit(do_not_specialize=["num_tokens", "num_heads", "num_kv_heads", "block_shift"])
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
    num_tokens,
    num_heads,
    num_kv_heads,
    block_shift,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    PASSING: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has HEADS heads of TOKENS tokens of q, of k or of v [T, KVH, D].

    It turns those of q and k as `rope_kernel` does. Turned heads of k, and those of v, go to the
    token's slot of the caches [blocks, KVH, block_size, D] too, unless slot_mapping [T] int64 has
    -1. DIM is HEAD_DIM, rounded up to a power of two.
    """
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.cast(tl.program_id(0), tl.int64) * TOKENS + row // HEADS
    group = tl.program_id(1)
    num_q_groups = tl.cdiv(num_heads, HEADS)
    num_kv_groups = tl.cdiv(num_kv_heads, HEADS)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    is_token = token < num_tokens
    if group < num_q_groups:
        angles = cos_sin_cache + tl.load(positions + token, mask=is_token, other=0) * cos_sin_stride
        head = tl.cast(group * HEADS + row % HEADS, tl.int64)
        turn_heads(
            *(q, q_out, None, token, head, is_token & (head < num_heads), is_token),
            *(q_token_stride, q_head_stride, q_out_token_stride, q_out_head_stride),
            *(angles, HEAD_DIM, HALF, PAIRS, PASSING),
        )
    elif group < num_q_groups + num_kv_groups:
        angles = cos_sin_cache + tl.load(positions + token, mask=is_token, other=0) * cos_sin_stride
        slot = tl.load(slot_mapping + token, mask=is_token, other=-1)
        head = tl.cast((group - num_q_groups) * HEADS + row % HEADS, tl.int64)
        exists = is_token & (head < num_kv_heads)
        slot_at = slot_of_heads(k_cache, slot, head, k_block_stride, block_shift, HEAD_DIM)
        turn_heads(
            *(k, k_out, slot_at, token, head, exists, exists & (slot >= 0)),
            *(k_token_stride, k_head_stride, k_out_token_stride, k_out_head_stride),
            *(angles, HEAD_DIM, HALF, PAIRS, PASSING),
        )
    else:
        slot = tl.load(slot_mapping + token, mask=is_token, other=-1)
        head = tl.cast((group - num_q_groups - num_kv_groups) * HEADS + row % HEADS, tl.int64)
        exists = is_token & (head < num_kv_heads)
        channel = tl.arange(0, DIM)[None, :]
        inside = exists[:, None] & (channel < HEAD_DIM)
        v_at = v + (token * v_token_stride + head * v_head_stride)[:, None]
        values = tl.load(v_at + channel, mask=inside, other=0.0)
        v_slot = slot_of_heads(v_cache, slot, head, v_block_stride, block_shift, HEAD_DIM)
        tl.store(v_slot[:, None] + channel, values, mask=inside & (slot >= 0)[:, None])


def bind_rope(spec: RopeSpec, gpu: Gpu) -> BoundOp:
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    kernels = _Kernels(spec, gpu, rope_kernel, **_channels(spec))

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
        kernels.launch(
            len(q),
            (num_heads, num_kv_heads),
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
            len(q),
            num_heads,
            num_kv_heads,
        )
        return q_out, k_out

    return BoundOp(run=run)


def bind_rope_kv_write(spec: RopeKvWriteSpec, gpu: Gpu) -> BoundOp:
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    block_shift = spec.block_size.bit_length() - 1
    dim = triton.next_power_of_2(spec.head_dim)
    kernels = _Kernels(spec, gpu, rope_kv_write_kernel, DIM=dim, **_channels(spec))

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
        kernels.launch(
            len(q),
            (num_heads, num_kv_heads, num_kv_heads),
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
            len(q),
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


class _Kernels:
    """A kernel in two tilings: few tokens are quick with small tiles, many with large ones."""

    def __init__(
        self,
        spec: RopeSpec,
        gpu: Gpu,
        function: Any,  # noqa: ANN401
        **constants: int,
    ) -> None:
        self._tilings: dict[str, tuple[Config, Kernel]] = {}
        for tokens in (FEW, MANY):
            config = _config(spec, gpu, tokens)
            self._tilings[tokens] = config, Kernel(gpu, function, config, **constants)

    def launch(self, num_tokens: int, heads: tuple[int, ...], *args: Tensor | float | None) -> None:
        """Launch the programs for so many heads of each tensor."""
        config, kernel = self._tilings[tokens_class(num_tokens)]
        tokens, heads_of_a_program = config.blocks["TOKENS"], config.blocks["HEADS"]
        programs = sum(-(-n // heads_of_a_program) for n in heads)
        kernel((-(-num_tokens // tokens), programs), *args)


def tokens_class(num_tokens: int) -> str:
    """Return how the table of configurations calls so many tokens."""
    return MANY if num_tokens >= _MANY_TOKENS else FEW


def _config(spec: RopeSpec, gpu: Gpu, tokens: str) -> Config:
    size = _TOKENS_OF_A_PROGRAM if tokens == MANY else 1
    pairs = size * _HEADS_OF_A_PROGRAM * triton.next_power_of_2(spec.head_dim) // 2
    default = Config(
        num_warps=max(1, pairs // _PAIRS_OF_A_WARP),
        blocks={"TOKENS": size, "HEADS": _HEADS_OF_A_PROGRAM},
    )
    return tuned(spec.op, gpu.sm, default, dtype=spec.dtype, head_dim=spec.head_dim, tokens=tokens)


def _require_int64(positions: Tensor, spec: RopeSpec) -> None:
    if positions.dtype != torch.int64:
        raise KernelError(f"{spec.op}: positions are {positions.dtype}; they must be torch.int64")
