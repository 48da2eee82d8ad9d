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
def inverse_of(divisor):
    """Return 1 / divisor, fp64, for `quotient`."""
    return 1.0 / divisor.to(tl.float64)


@triton.jit
def quotient(x, inverse):
    """Return fp32 x over fp32 `1 / inverse`, rounded as a division is, by a product in fp64.

    A quotient of fp32 numbers is 2^-49 of itself or more from where its rounding turns, the
    product 2^-52 from the quotient. Dividing each x would take a GPU longer.
    """
    return (x.to(tl.float64) * inverse).to(tl.float32)


@triton.jit
def adjusted_logits(logits, counts, index, inside, penalties):
    """Return logits [index] fp32 after the row's penalties, and -inf outside.

    counts [vocab] int16: twice how often the output has a token, and 1 more if the prompt has it.
    penalties: repetition, its inverse, presence, frequency. Products are rounded before they are
    subtracted, as everywhere else: kernels that call this must be `unfused`.
    """
    repetition, inverse, presence, frequency = penalties
    x = tl.load(logits + index, mask=inside, other=float("-inf")).to(tl.float32)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        seen = tl.load(counts + index, mask=inside, other=0).to(tl.int32)
        if repetition != 1.0:
            repeated = tl.where(x > 0, quotient(x, inverse), x * repetition)
            x = tl.where(seen != 0, repeated, x)
        count = seen >> 1
        x = x - frequency * count.to(tl.float32)
        x = x - presence * tl.where(count > 0, 1.0, 0.0)
    return x


@triton.jit
def penalties_of(row, repetition, presence, frequency):
    """Return the penalties of a row of the tables, as `adjusted_logits` takes them."""
    repeat = tl.load(repetition + row)
    return repeat, inverse_of(repeat), tl.load(presence + row), tl.load(frequency + row)


@triton.jit
def distances_in(source, index):
    """Return how far logits [index] are below the best, fp32; infinity outside.

    A source is a tuple of logits, counts, the vocabulary's size, the best logit, and penalties.
    """
    logits, counts, vocab, best, penalties = source
    inside = (index >= 0) & (index < vocab)
    return best - adjusted_logits(logits, counts, index, inside, penalties)


@triton.jit
def gaps_in(row, index):
    """Return the gaps of tokens `index`: distances over the temperature.

    Infinity is for what min_p rules out, and outside the vocabulary. A row is a tuple of a source,
    the inverse of the temperature, and the largest gap.
    """
    source, cool, max_gap = row
    gap = quotient(distances_in(source, index), cool)
    return tl.where(gap > max_gap, float("inf"), gap)


@triton.jit
def rough_gaps_in(row, index):
    """Return `gaps_in` but for rounding: off by 2^-22 of themselves at most."""
    source, cool, max_gap = row
    distance = distances_in(source, index)
    if max_gap < float("inf"):
        # Which gaps are just as large as they may be is a matter of rounding.
        exact = quotient(distance, cool)
        gap = tl.where(exact > max_gap, float("inf"), exact)
    else:
        gap = distance * cool.to(tl.float32)
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
    v = tl.fma((words ^ _ALL_BITS).to(tl.float32), _UNIT, 0.5 * _UNIT)
    square = v * v
    earliest = tl.fma(square, tl.fma(square, 0.25, tl.fma(v, 0.33333334, 0.5)), v)
    latest = tl.where(v < 0.5, tl.fma(square * square, 0.4 * v, earliest), 23.0)
    return earliest * stretch, latest * stretch


@triton.jit
def weights_of(gap):
    """Return exp(-gap), fp32, 0 where a token is ruled out."""
    return tl.exp2(gap * -_LOG2_E)
