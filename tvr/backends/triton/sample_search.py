"""The kernels of `sample` for rows whose first token is not taken: all programs share these rows.

`narrow_kernel`, more than once, finds between which gaps the kept tokens end, and `redraw_kernel`
which of the tokens that may be kept is drawn.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.sample_bracket import bracket_of, marks_in, total_of
from tvr.backends.triton.sample_kernels import CLOSE, best_of
from tvr.backends.triton.sample_race import LAST, winner_of
from tvr.backends.triton.sample_rows import (
    distance_upto,
    distances_of,
    exponent_of,
    id_at,
    last_at,
    loaded_in,
    logit_in,
    row_of,
)


@triton.jit(do_not_specialize=["best_parts", "parts", "round_stride"])
def narrow_kernel(
    logits,
    rows,
    temperature,
    max_gap,
    top_k,
    top_p,
    repetition,
    presence,
    frequency,
    counts,
    partials,
    masses,
    limits,
    searched,
    num_searched,
    counts_upto,
    masses_upto,
    logits_stride,
    counts_stride,
    vocab,
    tiles,
    best_parts,
    parts,
    round_stride,
    chunks,
    tiles_of_chunk,
    ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    MARKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs take the chunks, some tiles of tokens each, of rows searched [num_searched] int32.

    Of each they write, to [rounds, R, chunks, MARKS], how many tokens have gaps up to each mark,
    int32, and their weights' sum, fp32.
    """
    # A thread has registers for the sums of all marks of a column; to add those of threads up as
    # they come would take longer than to count.
    COLUMNS: tl.constexpr = BLOCK // 4
    column = tl.arange(0, 4)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    slot = tl.arange(0, MARKS)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    num_items = tl.load(num_searched) * chunks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        i = tl.load(searched + item // chunks).to(tl.int64)
        chunk = item % chunks
        row = tl.load(rows + i)
        best = logit_in(best_of(partials + i * KEYS, best_parts, KEYS))
        penalties = (repetition, presence, frequency, counts)
        strides = (logits_stride, counts_stride, vocab)
        facts = row_of(i, row, best, logits, temperature, max_gap, *penalties, *strides)
        source, heat, _ = facts
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        total = total_of(masses + i * tiles, parts, TILES)
        upto = i * chunks * MARKS
        sums = (counts_upto + upto, masses_upto + upto, round_stride, chunks)
        bracket = bracket_of(tl.load(limits + i), total, k, p, vocab, *sums, ROUND, CHUNKS)
        marks = distance_upto(marks_in(bracket, (k < vocab) & (p < 1.0)), heat)
        factor = exponent_of(heat)
        count = tl.zeros([MARKS, COLUMNS], tl.int32)
        mass = tl.zeros([MARKS, COLUMNS], tl.float32)
        begin = chunk * tiles_of_chunk * BLOCK
        next_x, next_counted = loaded_in(source, begin + column)
        for first in range(begin, tl.minimum(begin + tiles_of_chunk * BLOCK, vocab), BLOCK):
            distance = distances_of(source, next_x, next_counted)
            next_x, next_counted = loaded_in(source, first + BLOCK + column)
            weight = tl.exp2(distance * -factor)
            is_upto = distance[None, :, :] <= marks[:, None, None]
            count += tl.sum(is_upto.to(tl.int32), axis=1)
            mass += tl.sum(tl.where(is_upto, weight[None, :, :], 0.0), axis=1)
        at = ROUND * round_stride + upto + chunk * MARKS + slot
        tl.store(counts_upto + at, tl.sum(count, axis=1))
        tl.store(masses_upto + at, tl.sum(mass, axis=1))


@triton.jit(do_not_specialize=["best_parts", "parts", "round_stride"])
def redraw_kernel(
    logits,
    rows,
    positions,
    temperature,
    max_gap,
    top_k,
    top_p,
    seeds,
    repetition,
    presence,
    frequency,
    counts,
    partials,
    winners,
    masses,
    limits,
    searched,
    num_searched,
    counts_upto,
    masses_upto,
    logits_stride,
    counts_stride,
    vocab,
    tiles,
    best_parts,
    parts,
    round_stride,
    chunks,
    tiles_of_chunk,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROUNDS: tl.constexpr,
    MARKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Programs take the chunks of rows searched [num_searched] int32.

    Of each they write, to winners [R, tiles] int32, the token that would be drawn if the chunk's
    tokens that may be kept were all, -1 for none.
    """
    wait_for_inputs(PDL)
    let_next_start(PDL)
    num_items = tl.load(num_searched) * chunks
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        i = tl.load(searched + item // chunks).to(tl.int64)
        chunk = item % chunks
        row = tl.load(rows + i)
        best = logit_in(best_of(partials + i * KEYS, best_parts, KEYS))
        penalties = (repetition, presence, frequency, counts)
        strides = (logits_stride, counts_stride, vocab)
        facts = row_of(i, row, best, logits, temperature, max_gap, *penalties, *strides)
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        seed, position = tl.load(seeds + row), tl.load(positions + i)
        total = total_of(masses + i * tiles, parts, TILES)
        upto = i * chunks * MARKS
        sums = (counts_upto + upto, masses_upto + upto, round_stride, chunks)
        limit = tl.load(limits + i)
        high = bracket_of(limit, total, k, p, vocab, *sums, ROUNDS, CHUNKS)[1]
        limit = tl.minimum(limit, last_at(high))
        first = chunk * tiles_of_chunk
        num_tiles = tl.minimum(tiles_of_chunk, tiles - first)
        drawn = winner_of(facts, limit, seed, position, first, num_tiles, BLOCK, TILES, True, CLOSE)
        token = tl.where(drawn == LAST, -1, id_at(drawn))
        tl.store(winners + i * tiles + chunk, token)
