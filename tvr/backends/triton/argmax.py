"""Greedy choice of a token: a row is shared by as many programs as keep the device busy."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.contract import ArgmaxSpec, BoundOp, Bounds

_PROGRAMS_OF_AN_SM = 8
_PARTIAL_BYTES, _COUNTER_BYTES = 8, 4

_NAN_KEY = tl.constexpr(2**63 - 1)  # above any number's
_NO_KEY = tl.constexpr(-(2**63))  # below any number's
_SIGN_OFF = tl.constexpr(2**31 - 1)


@triton.jit
def key_of(logit, column, has_nan):
    """Return int64 keys: the largest has the largest logit and, among equals, the lowest id."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)  # -0 equals 0
    # As integers, floats are in order but for the negative ones, which are in reverse.
    ordered = tl.where(bits < 0, bits ^ _SIGN_OFF, bits).to(tl.int64)
    key = (ordered << 32) | (_SIGN_OFF - column)
    return tl.where(has_nan, _NAN_KEY, key)


@triton.jit
def id_of(key):
    return tl.where(key == _NAN_KEY, -1, _SIGN_OFF - (key & _SIGN_OFF))


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
    # What a lane has seen. Its ids come in rising order, so of equals the first is the lowest. Id 0
    # to begin with is the answer of a row that holds nothing above -inf, and of no other.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    has_nan = tl.zeros([BLOCK], tl.int1)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    logits += row * row_stride
    for start in range(begin, tl.minimum(begin + tiles * BLOCK, vocab), BLOCK):
        inside = start + column < vocab
        logit = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        larger = logit > best  # not if it is a NaN
        best = tl.where(larger, logit, best)
        best_id = tl.where(larger, start + column, best_id)
        has_nan |= logit != logit
    key = tl.max(key_of(best, best_id, has_nan), axis=0)
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
        Config(num_warps=8, blocks={"BLOCK": 4096, "KEYS": 256}),
        dtype=spec.dtype,
    )
    tiles_of_a_row = triton.cdiv(vocab, config.blocks["BLOCK"])
    most_programs = gpu.num_sms * _PROGRAMS_OF_AN_SM  # where rows are shared
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
