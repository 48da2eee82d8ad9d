"""The last kernel of `sample`: takes a token, and searches on where top_k or top_p rule it out."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tvr.backends.triton.argmax import id_of, key_of
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.sample_kernels import CLOSE, FAR, INF, LAST, NO_KEY, best_of, drawn_of
from tvr.backends.triton.sample_rows import (
    gap_at,
    gaps_in,
    gumbel_noise,
    inverse_of,
    logit_in,
    penalties_of,
    place_of,
    race_times,
    words_of_tile,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_ID_MASK = tl.constexpr(2**24 - 1)
_MOST_COUNTED = tl.constexpr(2 * (2**14 - 1))  # what int16 holds, the prompt's bit left out

# Sums of fp32 weights, of at most 2^-16 error, tell on which side of top_p a token is unless they
# are this near; then fp64 sums do.
_UNSURE = tl.constexpr(2.0**-14)


@triton.jit
def nearest_of(nearest, first, tiles, WIDE: tl.constexpr):
    """Return the smallest gap in tiles first, ..., first + WIDE - 1."""
    slot = first + tl.arange(0, WIDE)
    return tl.min(tl.load(nearest + slot, mask=slot < tiles, other=float("inf")), axis=0)


@triton.jit
def last_of_best(row, nearest, k, tiles, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return a place up to which there are `k` tokens, found digit by digit from the highest.

    Where there are fewer that no filter rules out, it is behind all of them.
    """
    column = tl.arange(0, WIDE * BLOCK)
    digits = tl.arange(0, 256)
    prefix = tl.cast(0, tl.int64)
    left = k
    limit = tl.cast(LAST, tl.int64)
    shift = 48
    while shift >= 0:
        found = tl.zeros([256], tl.int32)
        for first in range(0, tiles, WIDE):
            near = nearest_of(nearest, first, tiles, WIDE)
            if (near < INF) & (place_of(near, 0) <= limit):
                index = first * BLOCK + column
                gap = gaps_in(row, index)
                place = place_of(gap, index)
                fits = (gap < INF) & (place >> (shift + 8) == prefix)
                digit = ((place >> shift) & 255).to(tl.int32)
                found += tl.histogram(digit, 256, mask=fits)
        upto = tl.cumsum(found, axis=0)
        digit = tl.sum((upto < left).to(tl.int32), axis=0)
        left -= tl.sum(tl.where(digits < digit, found, 0), axis=0)
        prefix = (prefix << 8) | digit
        limit = ((prefix + 1) << shift) - 1
        # All of this digit's tokens are among the best: the lower digits do not matter.
        ended = tl.sum(tl.where(digits == digit, found, 0), axis=0) <= left
        shift = tl.where(ended, -1, shift - 8)
    return limit


@triton.jit
def mass_until(row, nearest, limit, tiles, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return the sum of weights, fp64, of tokens at places up to `limit`."""
    column = tl.arange(0, WIDE * BLOCK)
    mass = tl.zeros([WIDE * BLOCK], tl.float64)
    for first in range(0, tiles, WIDE):
        near = nearest_of(nearest, first, tiles, WIDE)
        if (near < INF) & (place_of(near, 0) <= limit):
            index = first * BLOCK + column
            gap = gaps_in(row, index)
            mass += tl.where(place_of(gap, index) <= limit, tl.exp(-gap.to(tl.float64)), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def drawn_until(
    row, nearest, limit, seed, position, tiles, BLOCK: tl.constexpr, WIDE: tl.constexpr
):
    """Return the place of the token with the largest score at places up to `limit`."""
    column = tl.arange(0, WIDE * BLOCK)
    best_key = tl.cast(NO_KEY, tl.int64)
    drawn = tl.cast(LAST, tl.int64)
    soonest = tl.cast(INF, tl.float32)
    for first in range(0, tiles, WIDE):
        near = nearest_of(nearest, first, tiles, WIDE)
        if (near < FAR) & (place_of(near, 0) <= limit):
            index = first * BLOCK + column
            gap = gaps_in(row, index)
            place = place_of(gap, index)
            gap = tl.where(place <= limit, gap, INF)
            words = words_of_tile(seed, position, first * BLOCK, WIDE * BLOCK)
            earliest, latest = race_times(words, gap)
            if tl.min(earliest, axis=0) <= soonest * CLOSE:
                soonest = tl.minimum(soonest, tl.min(latest, axis=0))
                key = key_of(gumbel_noise(words) - gap, index)
                key = tl.where(gap < INF, key, NO_KEY)
                largest = tl.max(key, axis=0)
                if largest > best_key:
                    best_key = largest
                    drawn = tl.min(tl.where(key == largest, place, LAST), axis=0)
    return drawn


@triton.jit(do_not_specialize=["parts"])
def choice_kernel(
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
    masses,
    counts_before,
    masses_before,
    last_token,
    out,
    logits_stride,
    counts_stride,
    vocab,
    tiles,
    parts,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes the token of a row: out [R] int64, -1 if the best logit is not finite.

    What was drawn is taken if it is among the k best and in the nucleus. If it is not, nor are
    those behind it, and the largest score of those before it decides. It stores the token in
    last_token [rows] int64 and, in a row with penalties, in counts [rows, vocab].
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    slot = tl.arange(0, TILES)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.load(rows + i)
    heat = tl.load(temperature + row)
    penalties = penalties_of(row, repetition, presence, frequency)
    repeat, _, present, frequent = penalties
    counts += row * counts_stride
    key = best_of(partials + i * KEYS, parts, KEYS)
    best = logit_in(key)
    token = id_of(key).to(tl.int32)
    if tl.abs(best) < INF:
        if heat > 0:
            k = tl.load(top_k + row)
            p = tl.load(top_p + row)
            seed = tl.load(seeds + row)
            position = tl.load(positions + i)
            logits += i * logits_stride
            nearest += i * tiles
            source = (logits, counts, vocab, best, penalties)
            facts = (source, inverse_of(heat), tl.load(max_gap + row))
            drawn = drawn_of(facts, winners + i * tiles, seed, position, tiles, TILES)
            has_k = k < vocab
            has_p = p < 1.0
            if has_k | has_p:
                at = i * tiles + slot
                inside = slot < tiles
                count = tl.sum(tl.load(counts_before + at, mask=inside, other=0), axis=0)
                mass = tl.load(masses_before + at, mask=inside, other=0.0).to(tl.float64)
                total = tl.load(masses + at, mask=inside, other=0.0).to(tl.float64)
                mass_before = tl.sum(mass, axis=0)
                # With both, the nucleus is one of the k best, whose mass is not known yet: it is
                # no less than that of those up to this token.
                upto = mass_before + tl.exp2(gap_at(drawn) * -_LOG2_E)
                whole = tl.where(has_k, upto, tl.sum(total, axis=0))
                is_in_nucleus = (p >= 1.0) | (mass_before < (p - _UNSURE) * whole)
                if (count >= k) | (is_in_nucleus == 0):
                    limit = tl.cast(LAST, tl.int64)
                    if has_k:
                        limit = last_of_best(facts, nearest, k, tiles, BLOCK, WIDE)
                    threshold = tl.cast(INF, tl.float64)
                    if has_p:
                        threshold = p * mass_until(facts, nearest, limit, tiles, BLOCK, WIDE)
                    searching = True
                    while searching:
                        if drawn > limit:
                            drawn = drawn_until(
                                facts, nearest, limit, seed, position, tiles, BLOCK, WIDE
                            )
                        limit = drawn - 1
                        searching = False
                        if has_p:
                            before = mass_until(facts, nearest, limit, tiles, BLOCK, WIDE)
                            searching = before >= threshold
            token = (drawn & _ID_MASK).to(tl.int32)
        if (repeat != 1.0) | (present != 0.0) | (frequent != 0.0):
            seen = tl.load(counts + token).to(tl.int32)
            more = tl.where(seen < _MOST_COUNTED, seen + 2, seen)
            tl.store(counts + token, more.to(tl.int16))
    else:
        token = -1
    tl.store(out + i, token.to(tl.int64))
    tl.store(last_token + row, tl.maximum(token, 0).to(tl.int64))
