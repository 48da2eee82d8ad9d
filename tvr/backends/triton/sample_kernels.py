"""The kernels of `sample` that share a row among programs.

They run one after another: `best_kernel` finds the largest logits, `race_kernel` which token of
each tile is drawn if none is filtered out, `before_kernel` what comes before the one drawn of all;
then sample_choice.py takes the token or, where top_k or top_p rule it out, another.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tvr.backends.triton.argmax import id_of, key_of
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.sample_rows import (
    adjusted_logits,
    gap_at,
    gaps_in,
    gumbel_noise,
    inverse_of,
    logit_in,
    penalties_of,
    place_of,
    race_times,
    rough_gaps_in,
    weights_of,
    words_of_ids,
    words_of_tile,
)

NO_KEY = tl.constexpr(-(2**63))  # below any number's
LAST = tl.constexpr(2**62)  # behind any place
INF = tl.constexpr(float("inf"))

# A gap beyond which no token is drawn, the noise being within 26 of any other's, nor of weight:
# all of a vocabulary there have less than 1e-8 of the best token's.
FAR = tl.constexpr(32.0)

# fp32's error in the ratio of two times, and what exact scores lose where they are rounded, are
# below 2^-15. Tokens that are no further apart are compared exactly.
CLOSE = tl.constexpr(1.0 + 2.0**-13)

# Added to a column of a tile, of which there are 4,096 at most: sums of 2 to 256 such are at least
# twice this. Larger ones may wrap, but then their columns alone sum up to more than a tile has.
_ONE = tl.constexpr(1 << 24)

# Of a rough gap: at most the exact one.
_LESS = tl.constexpr(1.0 - 2.0**-20)


@triton.jit
def best_of(partials, parts, KEYS: tl.constexpr):
    """Return the largest of partials [parts] int64, KEYS or fewer."""
    slot = tl.arange(0, KEYS)
    return tl.max(tl.load(partials + slot, mask=slot < parts, other=NO_KEY), axis=0)


@triton.jit
def drawn_of(row, winners, seed, position, tiles, TILES: tl.constexpr):
    """Return the place of the token with the largest score of winners [tiles] int32, -1 for none.

    Scores are exact, and of equals the lowest id is taken.
    """
    slot = tl.arange(0, TILES)
    ids = tl.load(winners + slot, mask=slot < tiles, other=-1)
    is_one = ids >= 0
    gap = gaps_in(row, ids)
    key = key_of(gumbel_noise(words_of_ids(seed, position, ids)) - gap, ids)
    key = tl.where(is_one, key, NO_KEY)
    return tl.min(tl.where(key == tl.max(key, axis=0), place_of(gap, ids), LAST), axis=0)


@triton.jit
def best_key(logits, counts, begin, end, vocab, penalties, BLOCK: tl.constexpr):
    """Return the key of the largest adjusted logit of tokens begin, ..., end - 1."""
    column = tl.arange(0, BLOCK)
    # As in argmax: a NaN stays for good, and a row of nothing above -inf gets id 0.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_tile = tl.zeros([BLOCK], tl.int32)
    for tile in range(begin, end, BLOCK):
        index = tile + column
        x = adjusted_logits(logits, counts, index, index < vocab, penalties)
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
    logits_stride,
    counts_stride,
    vocab,
    tiles_of_part,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes a part, `tiles_of_part` tiles of BLOCK logits, of a row of [R, vocab].

    It writes the key of the largest adjusted logit to partials [R, KEYS] int64.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    part = tl.program_id(1)
    begin = part * tiles_of_part * BLOCK
    end = tl.minimum(begin + tiles_of_part * BLOCK, vocab)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.load(rows + i)
    penalties = penalties_of(row, repetition, presence, frequency)
    repeat, _, present, frequent = penalties
    logits += i * logits_stride
    counts += row * counts_stride
    if (repeat != 1.0) | (present != 0.0) | (frequent != 0.0):
        # Tiles of half the size: a thread would not have registers for its share of a whole one.
        HALF: tl.constexpr = BLOCK // 2
        key = best_key(logits, counts, begin, end, vocab, penalties, HALF)
    else:
        key = best_key(logits, counts, begin, end, vocab, (1.0, 1.0, 0.0, 0.0), BLOCK)
    tl.store(partials + i * KEYS + part, key)


@triton.jit(do_not_specialize=["parts", "tiles_of_part"])
def race_kernel(
    logits,
    rows,
    positions,
    temperature,
    max_gap,
    top_p,
    seeds,
    repetition,
    presence,
    frequency,
    counts,
    partials,
    nearest,
    winners,
    masses,
    logits_stride,
    counts_stride,
    vocab,
    tiles,
    parts,
    tiles_of_part,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes some tiles of BLOCK tokens of a row that is not greedy.

    Of each it writes, to [R, tiles], the smallest gap, fp32; the token that would be drawn if the
    tile were all, int32, -1 for none; and the sum of weights, fp32, where top_p asks for it.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    first_tile = tl.program_id(1) * tiles_of_part
    column = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.load(rows + i)
    heat = tl.load(temperature + row)
    if heat > 0:
        best = logit_in(best_of(partials + i * KEYS, parts, KEYS))
        if tl.abs(best) < INF:
            has_nucleus = tl.load(top_p + row) < 1.0
            seed = tl.load(seeds + row)
            position = tl.load(positions + i)
            penalties = penalties_of(row, repetition, presence, frequency)
            logits += i * logits_stride
            counts += row * counts_stride
            source = (logits, counts, vocab, best, penalties)
            facts = (source, inverse_of(heat), tl.load(max_gap + row))
            for tile in range(first_tile, tl.minimum(first_tile + tiles_of_part, tiles)):
                first = tile * BLOCK
                index = first + column
                gap = rough_gaps_in(facts, index)
                near = tl.min(gap, axis=0)
                winner = -1
                mass = 0.0
                if near < FAR:
                    words = words_of_tile(seed, position, first, BLOCK)
                    earliest, latest = race_times(words, gap)
                    ahead = earliest <= tl.min(latest, axis=0) * CLOSE
                    # If it is one, its column, above what no other number of columns sums up to.
                    found = tl.sum(tl.where(ahead, _ONE + column, 0), axis=0) - _ONE
                    winner = first + found
                    if (found < 0) | (found >= BLOCK):
                        score = gumbel_noise(words) - gaps_in(facts, index)
                        winner = id_of(tl.max(key_of(score, index), axis=0)).to(tl.int32)
                    if has_nucleus:
                        mass = tl.sum(weights_of(gap), axis=0)
                place = i * tiles + tile
                tl.store(nearest + place, near * _LESS)
                tl.store(winners + place, winner)
                tl.store(masses + place, mass)


@triton.jit(do_not_specialize=["parts", "tiles_of_part"])
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
    nearest,
    winners,
    counts_before,
    masses_before,
    logits_stride,
    counts_stride,
    vocab,
    tiles,
    parts,
    tiles_of_part,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes some tiles of a row that has a top_k or a top_p.

    Of each it writes, to [R, tiles], how many tokens come before the one that was drawn, int32,
    and their weights' sum, fp32.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    first_tile = tl.program_id(1) * tiles_of_part
    column = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.load(rows + i)
    heat = tl.load(temperature + row)
    is_filtered = (tl.load(top_k + row) < vocab) | (tl.load(top_p + row) < 1.0)
    if (heat > 0) & is_filtered:
        best = logit_in(best_of(partials + i * KEYS, parts, KEYS))
        if tl.abs(best) < INF:
            penalties = penalties_of(row, repetition, presence, frequency)
            seed = tl.load(seeds + row)
            position = tl.load(positions + i)
            logits += i * logits_stride
            counts += row * counts_stride
            source = (logits, counts, vocab, best, penalties)
            facts = (source, inverse_of(heat), tl.load(max_gap + row))
            drawn = drawn_of(facts, winners + i * tiles, seed, position, tiles, TILES)
            for tile in range(first_tile, tl.minimum(first_tile + tiles_of_part, tiles)):
                count = 0
                mass = 0.0
                if tl.load(nearest + i * tiles + tile) <= gap_at(drawn):
                    index = tile * BLOCK + column
                    gap = gaps_in(facts, index)
                    is_before = place_of(gap, index) < drawn
                    count = tl.sum(is_before.to(tl.int32), axis=0)
                    mass = tl.sum(tl.where(is_before, weights_of(gap), 0.0), axis=0)
                tl.store(counts_before + i * tiles + tile, count)
                tl.store(masses_before + i * tiles + tile, mass)
