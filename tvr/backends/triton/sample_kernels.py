"""The kernels of `sample` that share a row among programs.

They run one after another: `best_kernel` finds the largest logits, `race_kernel` which token of
each part of a row is drawn if none is filtered out, `before_kernel` what comes before the one drawn
of all; then sample_choice.py takes the token or, where top_k or top_p rule it out, another.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tvr.backends.triton.argmax import key_of
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.sample_race import LAST, NO_KEY, drawn_of, winner_of
from tvr.backends.triton.sample_rows import (
    INF,
    adjusted,
    distances_of,
    exponent_of,
    farthest_of,
    id_at,
    is_within,
    loaded,
    loaded_in,
    logit_in,
    penalties_of,
    reach_of,
    row_of,
)

# fp32's error in the ratio of two times, and what exact scores lose where they are rounded, are
# below 2^-15. Tokens that are no further apart are compared exactly.
CLOSE = tl.constexpr(1.0 + 2.0**-13)


@triton.jit
def best_of(partials, parts, KEYS: tl.constexpr):
    """Return the largest of partials [parts] int64, KEYS or fewer."""
    slot = tl.arange(0, KEYS)
    return tl.max(tl.load(partials + slot, mask=slot < parts, other=NO_KEY), axis=0)


@triton.jit
def winner_in(row, winners, parts, seed, position, TILES: tl.constexpr):
    """Return the place of the token with the largest score of winners [parts] int32."""
    slot = tl.arange(0, TILES)
    ids = tl.load(winners + slot, mask=slot < parts, other=-1)
    return drawn_of(row, ids, LAST, seed, position)[1]


@triton.jit
def best_key(logits, counts, begin, end, vocab, penalties, BLOCK: tl.constexpr):
    """Return the key of the largest adjusted logit of tokens begin, ..., end - 1."""
    column = tl.arange(0, BLOCK)
    # As in argmax: a NaN stays for good, and a row of nothing above -inf gets id 0.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_tile = tl.zeros([BLOCK], tl.int32)
    next_x, next_counted = loaded(logits, counts, begin + column, begin + column < vocab, penalties)
    for tile in range(begin, end, BLOCK):
        x = adjusted(next_x, next_counted, penalties)
        ahead = tile + BLOCK + column
        next_x, next_counted = loaded(logits, counts, ahead, ahead < end, penalties)
        best_tile = tl.where(x > best, tile, best_tile)
        best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
    return tl.max(key_of(best, best_tile + column), axis=0)


@triton.jit(do_not_specialize=["tiles_of_part"])
def best_kernel(
    logits,
    rows,
    repetition,
    presence,
    frequency,
    counts,
    partials,
    num_searched,
    logits_stride,
    counts_stride,
    vocab,
    tiles_of_part,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes a part, `tiles_of_part` tiles of BLOCK logits, of a row of [R, vocab].

    It writes the key of the largest adjusted logit to partials [R, KEYS] int64. One program clears
    num_searched [1] int32, which rows are counted in later.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    part = tl.program_id(1)
    begin = part * tiles_of_part * BLOCK
    end = tl.minimum(begin + tiles_of_part * BLOCK, vocab)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    if (i == 0) & (part == 0):
        tl.store(num_searched, 0)
    row = tl.load(rows + i)
    penalties = penalties_of(row, repetition, presence, frequency)
    repeat, _, present, frequent, _ = penalties
    logits += i * logits_stride
    counts += row * counts_stride
    if (repeat != 1.0) | (present != 0.0) | (frequent != 0.0):
        # Tiles of half the size: a thread would not have registers for its share of a whole one.
        HALF: tl.constexpr = BLOCK // 2
        key = best_key(logits, counts, begin, end, vocab, penalties, HALF)
    else:
        key = best_key(logits, counts, begin, end, vocab, (1.0, 1.0, 0.0, 0.0, False), BLOCK)
    tl.store(partials + i * KEYS + part, key)


@triton.jit(do_not_specialize=["best_parts", "tiles_of_part"])
def race_kernel(
    logits,
    rows,
    positions,
    temperature,
    max_gap,
    seeds,
    repetition,
    presence,
    frequency,
    counts,
    partials,
    winners,
    logits_stride,
    counts_stride,
    vocab,
    tiles,
    best_parts,
    tiles_of_part,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes a part, some tiles of BLOCK tokens, of a row that is not greedy.

    It writes, to winners [R, tiles] int32, the token that would be drawn if the part were all, -1
    for none.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    part = tl.program_id(1)
    first = part * tiles_of_part
    num_tiles = tl.minimum(tiles_of_part, tiles - first)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.load(rows + i)
    if tl.load(temperature + row) > 0:
        best = logit_in(best_of(partials + i * KEYS, best_parts, KEYS))
        if tl.abs(best) < INF:
            penalties = (repetition, presence, frequency, counts)
            strides = (logits_stride, counts_stride, vocab)
            facts = row_of(i, row, best, logits, temperature, max_gap, *penalties, *strides)
            seed = tl.load(seeds + row)
            position = tl.load(positions + i)
            drawn = winner_of(
                facts, LAST, seed, position, first, num_tiles, BLOCK, TILES, False, CLOSE
            )
            token = tl.where(drawn == LAST, -1, id_at(drawn))
            tl.store(winners + i * tiles + part, token)


@triton.jit(do_not_specialize=["best_parts", "race_parts", "tiles_of_part"])
def before_kernel(
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
    counts_before,
    masses_before,
    masses,
    logits_stride,
    counts_stride,
    vocab,
    tiles,
    best_parts,
    race_parts,
    tiles_of_part,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes a part of a row that has a top_k or a top_p: some tiles, each WIDE others.

    It writes, to [R, tiles], how many tokens come before the one that was drawn, int32, and their
    weights' sum, and that of all, fp32.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    part = tl.program_id(1)
    first = part * tiles_of_part
    num_tiles = tl.minimum(tiles_of_part, tl.cdiv(tiles, WIDE) - first)
    SPAN: tl.constexpr = WIDE * BLOCK
    column = tl.arange(0, SPAN)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.load(rows + i)
    has_k = tl.load(top_k + row) < vocab
    if (tl.load(temperature + row) > 0) & (has_k | (tl.load(top_p + row) < 1.0)):
        best = logit_in(best_of(partials + i * KEYS, best_parts, KEYS))
        if tl.abs(best) < INF:
            penalties = (repetition, presence, frequency, counts)
            strides = (logits_stride, counts_stride, vocab)
            facts = row_of(i, row, best, logits, temperature, max_gap, *penalties, *strides)
            source, heat, most = facts
            seed = tl.load(seeds + row)
            position = tl.load(positions + i)
            drawn = winner_in(facts, winners + i * tiles, race_parts, seed, position, TILES)
            reach = reach_of(drawn - 1, heat)
            farthest = farthest_of(most, heat)
            factor = exponent_of(heat)
            count = tl.zeros([SPAN], tl.int32)
            mass_before = tl.zeros([SPAN], tl.float32)
            mass = tl.zeros([SPAN], tl.float32)
            next_x, next_counted = loaded_in(source, first * SPAN + column)
            for tile in range(first, first + num_tiles):
                index = tile * SPAN + column
                distance = distances_of(source, next_x, next_counted)
                next_x, next_counted = loaded_in(source, index + SPAN)
                is_before = is_within(distance, index, reach)
                weight = tl.exp2(distance * -factor)
                mass_before += tl.where(is_before, weight, 0.0)
                mass += tl.where(distance <= farthest, weight, 0.0)
                if has_k:
                    count += is_before.to(tl.int32)
            at = i * tiles + part
            tl.store(counts_before + at, tl.sum(count, axis=0))
            tl.store(masses_before + at, tl.sum(mass_before, axis=0))
            tl.store(masses + at, tl.sum(mass, axis=0))
