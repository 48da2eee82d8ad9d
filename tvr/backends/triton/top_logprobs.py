"""Log-probabilities of a token of each row, and of the likeliest: two launches.

Rows are cut into segments. The first launch finds the largest logit and the sum of exponentials of
each. The k best tokens of a row are in the k segments with the largest maxima, so the second one
reads only these again.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import torch
import triton
import triton.language as tl
from torch import Tensor

from tvr.backends.triton.argmax import key_of
from tvr.backends.triton.configs import tuned
from tvr.backends.triton.device import LOG2_E, let_next_start, wait_for_inputs
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.backends.triton.sample_rows import logit_in
from tvr.backends.triton.sharing import programs_at_a_time, shared
from tvr.contract import LOGPROB_FLOOR, BoundOp, Bounds, TopLogprobsSpec

_LOG2_E = tl.constexpr(LOG2_E)
_FLOOR = tl.constexpr(LOGPROB_FLOOR)
_LARGEST_INT32 = tl.constexpr(2**31 - 1)
_NO_KEY = tl.constexpr(-(2**63))  # below any number's
_INF = tl.constexpr(float("inf"))


@triton.jit
def token_in(tokens, row):
    """Return the token of a row, 0 if it has none."""
    return tl.maximum(tl.load(tokens + row), 0)


@triton.jit
def raw_id(key):
    """Return the id in a key, that of a NaN too."""
    return ((key & _LARGEST_INT32) ^ _LARGEST_INT32).to(tl.int32)


@triton.jit(do_not_specialize=["tokens", "segments_of_part"])
def segments_kernel(
    logits,
    tokens,
    largest,
    sums,
    counts,
    row_stride,
    vocab,
    segments,
    segments_of_part,
    SEGMENTS: tl.constexpr,
    SEGMENT: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes `segments_of_part` segments, SEGMENTS at a time, of a row of [R, vocab].

    It writes each one's largest logit and sum of exponentials below it to [R, segments] fp32, and
    how many tokens of the part come before the row's own to counts [R, parts] int32.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    part = tl.program_id(1)
    begin = part * segments_of_part
    end = tl.minimum(begin + segments_of_part, segments)
    line = tl.arange(0, SEGMENTS)
    column = tl.arange(0, SEGMENT)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    token = token_in(tokens, i)
    logits += i * row_stride
    own = tl.load(logits + token).to(tl.float32)
    ahead = tl.zeros([SEGMENTS, SEGMENT], tl.int32)
    for first in range(begin, end, SEGMENTS):
        segment = first + line
        index = segment[:, None] * SEGMENT + column[None, :]
        x = tl.load(logits + index, mask=index < vocab, other=float("-inf")).to(tl.float32)
        ahead += ((x > own) | ((x == own) & (index < token))).to(tl.int32)
        best = tl.max(x, axis=1)
        # What is all -inf weighs nothing: not -inf less -inf.
        base = tl.where(best == -_INF, 0.0, best)
        weights = tl.exp2((x - base[:, None]) * _LOG2_E)
        tl.store(largest + i * segments + segment, best, mask=segment < segments)
        tl.store(sums + i * segments + segment, tl.sum(weights, axis=1), mask=segment < segments)
    count = tl.sum(tl.sum(ahead, axis=1), axis=0)
    tl.store(counts + i * tl.num_programs(1) + part, count)


@triton.jit(do_not_specialize=["tokens", "ids", "values", "ranks", "parts", "k"])
def merge_kernel(
    logits,
    tokens,
    largest,
    sums,
    counts,
    ids,
    values,
    ranks,
    row_stride,
    vocab,
    segments,
    parts,
    k,
    SEGMENT: tl.constexpr,
    ALL: tl.constexpr,
    PARTS: tl.constexpr,
    TOP: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes a row: ids, values [R, 1 + k] int64, fp32; ranks [R] int64.

    ALL, PARTS and TOP are powers of two from segments, the most parts and the most of k on.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    slot = tl.arange(0, ALL)
    place = tl.arange(0, TOP)
    part = tl.arange(0, PARTS)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    token = token_in(tokens, i)
    logits += i * row_stride
    own = tl.load(logits + token).to(tl.float32)
    ahead = tl.load(counts + i * parts + part, mask=part < parts, other=0)
    tl.store(ranks + i, tl.sum(ahead, axis=0).to(tl.int64) + 1)

    is_segment = slot < segments
    best = tl.load(largest + i * segments + slot, mask=is_segment, other=float("-inf"))
    weights = tl.load(sums + i * segments + slot, mask=is_segment, other=0.0)
    # Where it is not finite, a segment's weight is NaN, and so is what is made of it.
    row_best = tl.max(best, axis=0)
    weights *= tl.exp2((best - row_best) * _LOG2_E)
    log_mass = tl.log(tl.sum(weights.to(tl.float64), axis=0))

    # Of segments, too, the lower is first among equals: its ids are.
    key = tl.where(is_segment, key_of(best, slot), _NO_KEY)
    chosen = tl.full([TOP], -1, tl.int32)
    for j in range(tl.minimum(k, segments)):
        first = tl.max(key, axis=0)
        chosen = tl.where(place == j, raw_id(first), chosen)
        key = tl.where(key == first, _NO_KEY, key)

    index = chosen[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    inside = (chosen >= 0)[:, None] & (index < vocab)
    x = tl.load(logits + index, mask=inside, other=float("-inf")).to(tl.float32)
    keys = tl.where(inside, key_of(x, index), _NO_KEY)
    keys = tl.reshape(keys, [TOP * SEGMENT])
    top = tl.full([TOP], _NO_KEY, tl.int64)
    for j in range(k):
        first = tl.max(keys, axis=0)
        top = tl.where(place == j, first, top)
        keys = tl.where(keys == first, _NO_KEY, keys)

    ids += i * (k + 1)
    values += i * (k + 1)
    tl.store(ids, token)
    tl.store(values, logprob_of(own, row_best, log_mass))
    is_asked = place < k
    tl.store(ids + 1 + place, raw_id(top).to(tl.int64), mask=is_asked)
    tl.store(values + 1 + place, logprob_of(logit_in(top), row_best, log_mass), mask=is_asked)


@triton.jit
def logprob_of(logit, best, log_mass):
    """Return the log-probability, fp32, from the best logit and the log of all weights below it."""
    value = ((logit - best).to(tl.float64) - log_mass).to(tl.float32)
    return tl.where(value < _FLOOR, _FLOOR, value)  # a NaN stays one


def bind_top_logprobs(spec: TopLogprobsSpec, gpu: Gpu) -> BoundOp:
    vocab = spec.vocab_size
    config = tuned(
        "top_logprobs",
        gpu.sm,
        Config(num_warps=4, blocks={"SEGMENTS": 16, "SEGMENT": 128}),
        dtype=spec.dtype,
    )
    segment, at_once = config.blocks["SEGMENT"], config.blocks["SEGMENTS"]
    segments = triton.cdiv(vocab, segment)
    tiles = triton.cdiv(segments, at_once)
    programs = programs_at_a_time(gpu, config)
    first = Kernel(gpu, segments_kernel, config)
    merge = Kernel(
        gpu,
        merge_kernel,
        Config(num_warps=8),
        SEGMENT=segment,
        ALL=triton.next_power_of_2(segments),
        PARTS=triton.next_power_of_2(tiles),
        TOP=triton.next_power_of_2(spec.num_top),
    )
    workspace: dict[str, Tensor] = {}
    row_bytes = {"largest": 4 * segments, "sums": 4 * segments, "counts": 4 * tiles}
    bytes_of_a_row: int = sum(row_bytes.values())

    def run(
        logits: Tensor, tokens: Tensor, *, ids: Tensor, values: Tensor, ranks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """logits [R, vocab]; tokens, ranks [R]; ids, values [R, 1 + k]: the token, the k best."""
        n = len(logits)
        parts, tiles_of_part = shared(n, tiles, programs)
        found = (workspace["largest"], workspace["sums"], workspace["counts"])
        sizes = (logits.stride(0), vocab, segments)
        first((n, parts), logits, tokens, *found, *sizes, tiles_of_part * at_once)
        k = ids.shape[1] - 1
        merge((n,), logits, tokens, *found, ids, values, ranks, *sizes, parts, k)
        return ids, values, ranks

    def workspace_bytes(bounds: Bounds) -> int:
        """Return room for what the first launch finds of each row."""
        return bounds.max_num_seqs * bytes_of_a_row

    def attach(tensor: Tensor) -> None:
        """Take the workspace. Every run writes what it reads there."""
        rows, begin = len(tensor) // bytes_of_a_row, 0
        for name, num_bytes in row_bytes.items():
            end = begin + rows * num_bytes
            dtype = torch.int32 if name == "counts" else torch.float32
            workspace[name], begin = tensor[begin:end].view(dtype), end

    return BoundOp(run=run, workspace_bytes=workspace_bytes, attach=attach)
