"""Store new keys and values in the slots of the paged cache."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.contract import BoundOp, KvWriteSpec

_HEADS_OF_A_PROGRAM = 8
_CHANNELS_OF_A_WARP = 512  # of k, and as many of v: two loads of 16 bytes a thread and tensor


@triton.jit
def slot_of_heads(cache, slot, head, block_stride, block_shift, HEAD_DIM: tl.constexpr):
    """Return where slot `slot` starts in heads `head` [HEADS] of a paged cache.

    64 bits: a pool may hold more than 2^31 elements. For slot -1 nothing may be written there.
    """
    block = slot >> block_shift
    token = slot - (block << block_shift)
    rows = (tl.cast(head, tl.int64) << block_shift) + token
    return cache + block * block_stride + rows * HEAD_DIM


@triton.jit
def heads_to_cache(slot, num_kv_heads):
    """Return how many heads of a token are written: none for slot -1."""
    return tl.where(slot >= 0, num_kv_heads, 0)


@triton.jit(do_not_specialize=["num_kv_heads", "block_shift"])
def kv_write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_block_stride,
    v_block_stride,
    num_kv_heads,
    block_shift,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program copies HEADS heads of one token of k and v [T, KVH, D] to the token's slot.

    The caches are [blocks, KVH, block_size, D]; slot_mapping [T] int64 has -1 for no slot. DIM is
    HEAD_DIM, rounded up to a power of two. Bits are copied.
    """
    token = tl.cast(tl.program_id(0), tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, DIM)[None, :]
    inside = (head < num_kv_heads)[:, None] & (channel < HEAD_DIM)
    wide_head = tl.cast(head, tl.int64)[:, None]
    wait_for_inputs(PDL)
    let_next_start(PDL)
    slot = tl.load(slot_mapping + token)
    # Loaded whatever the slot is: to look at it first would keep all other tokens waiting.
    k_at = k + token * k_token_stride + wide_head * k_head_stride + channel
    v_at = v + token * v_token_stride + wide_head * v_head_stride + channel
    keys = tl.load(k_at, mask=inside, other=0.0)
    values = tl.load(v_at, mask=inside, other=0.0)
    k_slot = slot_of_heads(k_cache, slot, head, k_block_stride, block_shift, HEAD_DIM)
    v_slot = slot_of_heads(v_cache, slot, head, v_block_stride, block_shift, HEAD_DIM)
    inside = (head < heads_to_cache(slot, num_kv_heads))[:, None] & (channel < HEAD_DIM)
    tl.store(k_slot[:, None] + channel, keys, mask=inside)
    tl.store(v_slot[:, None] + channel, values, mask=inside)


def bind_kv_write(spec: KvWriteSpec, gpu: Gpu) -> BoundOp:
    num_kv_heads, head_dim = spec.num_kv_heads, spec.head_dim
    block_shift = spec.block_size.bit_length() - 1
    dim = triton.next_power_of_2(head_dim)
    default = Config(
        num_warps=max(1, _HEADS_OF_A_PROGRAM * dim // _CHANNELS_OF_A_WARP),
        blocks={"HEADS": _HEADS_OF_A_PROGRAM},
    )
    config = tuned("kv_write", gpu.sm, default, dtype=spec.dtype, head_dim=head_dim)
    kernel = Kernel(gpu, kv_write_kernel, config, HEAD_DIM=head_dim, DIM=dim)
    programs_of_a_token = -(-num_kv_heads // config.blocks["HEADS"])

    def run(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Write row t of k and v [T, KVH, D] to slot `slot_mapping[t]`; -1: write nothing."""
        kernel(
            (len(k), programs_of_a_token),
            k,
            v,
            k_cache,
            v_cache,
            slot_mapping,
            *k.stride()[:2],
            *v.stride()[:2],
            k_cache.stride(0),
            v_cache.stride(0),
            num_kv_heads,
            block_shift,
        )

    return BoundOp(run=run)
