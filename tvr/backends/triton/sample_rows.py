"""What the kernels of `sample` compute of a row's logits: penalties, gaps, random numbers."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_ID_BITS = tl.constexpr(24)  # of a place: ids of the largest vocabularies take 18
_LARGEST_INT32 = tl.constexpr(2**31 - 1)
_UNIT = tl.constexpr(2.0**-32)
_ALL_BITS = tl.constexpr(0xFFFFFFFF)


@triton.jit
def quotient(x, divisor):
    """Return x / divisor, rounded once, as a product in fp64 with the divisor's inverse.

    A quotient of fp32 numbers is 2^-49 or further from where rounding to fp32 turns, the product
    2^-52 from the quotient. Dividing each x would take a GPU longer.
    """
    inverse = 1.0 / divisor.to(tl.float64)
    return (x.to(tl.float64) * inverse).to(tl.float32)


@triton.jit
def adjusted_logits(logits, counts, index, inside, repetition, presence, frequency):
    """Return logits [index] fp32 after the row's penalties, and -inf outside.

    counts [vocab] int16: twice how often the output has a token, and 1 more if the prompt has it.
    Not fused: products are rounded before they are subtracted, as everywhere else.
    """
    x = tl.load(logits + index, mask=inside, other=float("-inf")).to(tl.float32)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        seen = tl.load(counts + index, mask=inside, other=0).to(tl.int32)
        if repetition != 1.0:
            repeated = tl.where(x > 0, quotient(x, repetition), x * repetition)
            x = tl.where(seen != 0, repeated, x)
        count = seen >> 1
        x = x - frequency * count.to(tl.float32)
        x = x - presence * tl.where(count > 0, 1.0, 0.0)
    return x


@triton.jit
def gaps_in(row, index):
    """Return how far logits [index] of a row are below its best, over the temperature.

    Infinity is for what min_p rules out, and outside the vocabulary. A row is a tuple of its
    logits and counts, the vocabulary's size, its best logit, and its parameters.
    """
    logits, counts, vocab, best, temperature, max_gap, repetition, presence, frequency = row
    inside = (index >= 0) & (index < vocab)
    x = adjusted_logits(logits, counts, index, inside, repetition, presence, frequency)
    gap = quotient(best - x, temperature)
    return tl.where(gap > max_gap, float("inf"), gap)


@triton.jit
def rough_gaps_in(row, index):
    """Return `gaps_in` but for rounding: off by 2^-22 of themselves at most."""
    logits, counts, vocab, best, temperature, max_gap, repetition, presence, frequency = row
    x = adjusted_logits(logits, counts, index, index < vocab, repetition, presence, frequency)
    if max_gap < float("inf"):
        # Which gaps are just as large as they may be is a matter of rounding.
        exact = quotient(best - x, temperature)
        gap = tl.where(exact > max_gap, float("inf"), exact)
    else:
        gap = (best - x) * (1.0 / temperature)
    return gap


@triton.jit
def place_of(gap, id):
    """Return the int64 by which tokens are ordered: smaller gaps come first, then lower ids."""
    # The bits of floats that are not negative order as integers do.
    return (gap.to(tl.int32, bitcast=True).to(tl.int64) << _ID_BITS) | id


@triton.jit
def gap_at(place):
    """Return the gap in a place."""
    return (place >> _ID_BITS).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def logit_in(key):
    """Return the logit in a key of argmax's `key_of`."""
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ _LARGEST_INT32, ordered)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def words_of_tile(seed, position, first, BLOCK: tl.constexpr):
    """Return the random uint32 words of tokens first, ..., first + BLOCK - 1; 4 divides both."""
    block = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = tl.zeros_like(block)
    w0, w1, w2, w3 = tl.philox(seed, zero + position.to(tl.uint32), block, zero, zero)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def words_of_ids(seed, position, ids):
    """Return the random uint32 words of some token ids."""
    block = (ids >> 2).to(tl.uint32)
    zero = tl.zeros_like(block)
    w0, w1, w2, w3 = tl.philox(seed, zero + position.to(tl.uint32), block, zero, zero)
    lane = ids & 3
    return tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))


@triton.jit
def gumbel_noise(words):
    """Return the standard Gumbel variates of random words: fp64 inside, rounded to fp32."""
    u = (words.to(tl.float64) + 0.5) * _UNIT
    return (-tl.log(-tl.log(u))).to(tl.float32)


@triton.jit
def race_times(words, gap):
    """Return bounds, fp32, of the times at which tokens arrive: the first one is drawn.

    A token's time is -log(u) exp(gap), and so exp(-(noise - gap)): the least has the most noise
    left. With v = 1 - u, -log(u) is at least the head of its series, v + v^2/2 + v^3/3 + v^4/4.
    Up to v = 1/2 it is no more than 2/5 v^5 above that; it never is above 23.
    """
    # Whatever is that far is never first, and stays below infinity.
    stretch = tl.exp2(tl.minimum(gap, 64.0) * _LOG2_E)
    v = ((words ^ _ALL_BITS).to(tl.float32) + 0.5) * _UNIT
    square = v * v
    earliest = v + square * (0.5 + v * 0.33333334 + square * 0.25)
    latest = tl.where(v < 0.5, earliest + square * square * v * 0.4, 23.0)
    return earliest * stretch, latest * stretch


@triton.jit
def weights_of(gap):
    """Return exp(-gap), fp32, 0 where a token is ruled out."""
    return tl.exp2(gap * -_LOG2_E)
