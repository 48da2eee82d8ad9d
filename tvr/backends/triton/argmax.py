"""Greedy choice of a token: a row is shared by as many programs as keep the device busy."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.backends.triton.sharing import programs_at_a_time
from tvr.contract import ArgmaxSpec, BoundOp, Bounds

_PARTIAL_BYTES, _COUNTER_BYTES = 8, 4

_LARGEST_INT32 = tl.constexpr(2**31 - 1)
_NO_KEY = tl.constexpr(-(2**63))  # below any number's


@triton.jit
def key_of(logit, id):
    """Return int64 keys: the largest has the largest logit and, among equals, the lowest id.

    A NaN is the largest of all.
    """
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0, its equal
    # As integers, floats are in order but for the negative ones, which are in reverse.
    ordered = tl.where(bits < 0, bits ^ _LARGEST_INT32, bits)
    ordered = tl.where(logit != logit, _LARGEST_INT32, ordered)
    return (ordered.to(tl.int64) << 32) | (_LARGEST_INT32 - id)


@triton.jit
def id_of(key):
    """Return the id in a key, or -1 for a NaN's."""
    return tl.where(key >> 32 == _LARGEST_INT32, -1, _LARGEST_INT32 - (key & _LARGEST_INT32))


@triton.jit(do_not_specialize=["tiles"])
def argmax_kernel(
    logits,
    out,
    partials,
    counters,
    row_stride,
    vocab,
    tiles,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes a part, `tiles` tiles of BLOCK logits, of a row of logits [rows, vocab].

    Of the programs of a row, the last to arrive combines: it finds all their keys in partials
    [rows, parts] int64, and leaves counters [rows] int32 as it was, zeros. out [rows] int64.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    begin = part * tiles * BLOCK
    column = tl.arange(0, BLOCK)
    # What a lane has seen: its largest logit, or NaN for good, and the tile where that came first.
    # A row that holds nothing above -inf keeps the first tile, and so gets id 0.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_tile = tl.zeros([BLOCK], tl.int32)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    logits += row * row_stride
    for tile in range(begin, tl.minimum(begin + tiles * BLOCK, vocab), BLOCK):
        inside = tile + column < vocab
        logit = tl.load(logits + tile + column, mask=inside, other=float("-inf")).to(tl.float32)
        best_tile = tl.where(logit > best, tile, best_tile)
        best = tl.maximum(best, logit, propagate_nan=tl.PropagateNan.ALL)
    key = tl.max(key_of(best, best_tile + column), axis=0)
    if parts == 1:
        tl.store(out + row, id_of(key))
    else:
        partials += row * parts
        tl.store(partials + part, key)
        # Releases the key before it counts, and acquires all keys that were counted before.
        arrived = tl.atomic_add(counters + row, 1, sem="acq_rel")
        if arrived == parts - 1:
            slot = tl.arange(0, KEYS)
            keys = tl.full([KEYS], _NO_KEY, tl.int64)
            for first in range(0, parts, KEYS):
                inside = first + slot < parts
                # Volatile: read where other programs' keys arrive, not from a cache of this SM.
                more = tl.load(partials + first + slot, mask=inside, other=_NO_KEY, volatile=True)
                keys = tl.maximum(keys, more)
            tl.store(out + row, id_of(tl.max(keys, axis=0)))
            tl.store(counters + row, 0)


def bind_argmax(spec: ArgmaxSpec, gpu: Gpu) -> BoundOp:
    vocab = spec.vocab_size
    config = tuned(
        "argmax",
        gpu.sm,
        Config(num_warps=4, blocks={"BLOCK": 2048, "KEYS": 256}),
        dtype=spec.dtype,
    )
    tiles_of_a_row = triton.cdiv(vocab, config.blocks["BLOCK"])
    most_programs = programs_at_a_time(gpu, config)  # of shared rows
    kernel = Kernel(gpu, argmax_kernel, config)
    workspace: dict[str, Tensor] = {}

    def run(logits: Tensor, *, out: Tensor) -> Tensor:
        """out [T] int64: lowest id of the largest of logits [T, vocab]; -1 where a row has NaN."""
        rows = len(logits)
        parts = max(1, min(most_programs // max(1, rows), tiles_of_a_row))
        tiles = triton.cdiv(tiles_of_a_row, parts)
        kernel(
            (rows, triton.cdiv(tiles_of_a_row, tiles)),
            logits,
            out,
            workspace["partials"],
            workspace["counters"],
            logits.stride(0),
            vocab,
            tiles,
        )
        return out

    def workspace_bytes(bounds: Bounds) -> int:
        """Return room for a key of each part and a counter of each row that is shared."""
        return most_programs * (_PARTIAL_BYTES + _COUNTER_BYTES)

    def attach(tensor: Tensor) -> None:
        """Take a zeroed workspace: counters start at 0, where every run leaves them again."""
        ends = most_programs * _PARTIAL_BYTES
        workspace["partials"] = tensor[:ends].view(torch.int64)
        workspace["counters"] = tensor[ends:].view(torch.int32)

    return BoundOp(run=run, workspace_bytes=workspace_bytes, attach=attach)
