"""What the kernels of `sample` compute of a row's logits: penalties, distances, gaps, places."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tvr.backends.triton.launch import is_interpreted
from tvr.backends.triton.probe import release

INF = tl.constexpr(float("inf"))

_LOG2_E = tl.constexpr(1.4426950408889634)
_ID_BITS = tl.constexpr(24)  # of a place: ids of the largest vocabularies take 18
_ID_MASK = tl.constexpr(2**24 - 1)
_LARGEST_INT32 = tl.constexpr(2**31 - 1)

#: Whether `tl.fma` rounds once. The interpreter before 3.9 rounds its product, too.
FUSES = tl.constexpr(not is_interpreted() or release(triton.__version__) >= (3, 9))

# Between these `usual_quotient` is right: remainders of it are no less than 2^-149.
_SMALL = tl.constexpr(2.0**-24)
_LARGE = tl.constexpr(2.0**24)


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
def usual_quotient(x, divisor, inverse):
    """Return what `quotient` does, where no intermediate result can be out of fp32's range.

    inverse: 1 / divisor, rounded to fp32. The quotient is corrected twice by what its product with
    the divisor leaves of x; a GPU has that by one instruction, and changes of type take it longer.

    Source: Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor",
    1990: with the inverse rounded right, a correction of a quotient that is off by less than its
    last place gives the quotient rounded right.
    """
    negative = -divisor  # of a tensor a minus is an instruction of its own
    q = x * inverse
    q = tl.fma(tl.fma(q, negative, x), inverse, q)
    return tl.fma(tl.fma(q, negative, x), inverse, q)


@triton.jit
def loaded(logits, counts, index, inside, penalties):
    """Return logits [index], -inf outside, and, where they matter, counts [index] int16.

    What is loaded a tile ahead of its use costs a program no time; see `adjusted` for the rest.
    """
    repetition, _, presence, frequency, _ = penalties
    x = tl.load(logits + index, mask=inside, other=float("-inf"))
    seen = tl.zeros_like(index).to(tl.int16)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        seen = tl.load(counts + index, mask=inside, other=0)
    return x, seen


@triton.jit
def adjusted(x, counted, penalties):
    """Return logits `x` fp32 after the row's penalties, their tokens being `counted`, int16.

    counts [vocab] int16: twice how often the output has a token, and 1 more if the prompt has it.
    penalties: repetition, its inverse, presence, frequency, and whether `usual_quotient` serves.
    Products are rounded before they are subtracted, as everywhere else: kernels that call this must
    be `unfused`.
    """
    repetition, inverse, presence, frequency, is_usual = penalties
    x = x.to(tl.float32)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        seen = counted.to(tl.int32)
        if repetition != 1.0:
            if is_usual:
                divided = usual_quotient(x, repetition, inverse.to(tl.float32))
            else:
                divided = quotient(x, inverse)
            repeated = tl.where(x > 0, divided, x * repetition)
            x = tl.where(seen != 0, repeated, x)
        if frequency != 0.0:
            x = x - frequency * (seen >> 1).to(tl.float32)
        if presence != 0.0:
            x = tl.where(seen > 1, x - presence, x)
    return x


@triton.jit
def penalties_of(row, repetition, presence, frequency):
    """Return the penalties of a row of the tables, as `adjusted` takes them of any logits."""
    repeat = tl.load(repetition + row)
    return repeat, inverse_of(repeat), tl.load(presence + row), tl.load(frequency + row), False


@triton.jit
def penalties_below(best, row, repetition, presence, frequency):
    """Return the penalties of a row for the distances of its logits from the best.

    A logit so small that its remainders are out of range has no part in its distance from a best
    one that is not.
    """
    repeat, inverse, present, frequent, _ = penalties_of(row, repetition, presence, frequency)
    is_usual = False
    if FUSES:
        size, more = tl.abs(best), tl.maximum(tl.abs(present), tl.abs(frequent))
        is_usual = (size > _SMALL) & (repeat > _SMALL)
        is_usual = is_usual & (tl.maximum(size, more) < _LARGE) & (repeat < _LARGE)
    return repeat, inverse, present, frequent, is_usual


@triton.jit
def loaded_in(source, index):
    """Return what `distances_of` makes distances of, loaded from a source.

    A source is a tuple of logits, counts, the vocabulary's size, the best logit, and penalties.
    """
    logits, counts, vocab, _, penalties = source
    return loaded(logits, counts, index, (index >= 0) & (index < vocab), penalties)


@triton.jit
def distances_of(source, x, counted):
    """Return how far loaded logits are below the best, fp32; infinity outside."""
    _, _, _, best, penalties = source
    return best - adjusted(x, counted, penalties)


@triton.jit
def distances_in(source, index):
    """Return how far logits [index] are below the best, fp32; infinity outside."""
    x, counted = loaded_in(source, index)
    return distances_of(source, x, counted)


@triton.jit
def row_of(
    i,
    row,
    best,
    logits,
    temperature,
    max_gap,
    repetition,
    presence,
    frequency,
    counts,
    logits_stride,
    counts_stride,
    vocab,
):
    """Return row `i` of the logits and `row` of the tables: a source, temperature, largest gap."""
    penalties = penalties_below(best, row, repetition, presence, frequency)
    source = (logits + i * logits_stride, counts + row * counts_stride, vocab, best, penalties)
    return source, tl.load(temperature + row), tl.load(max_gap + row)


@triton.jit
def gaps_in(row, index):
    """Return the gaps of tokens `index`: distances over the temperature.

    Infinity is for what min_p rules out, and outside the vocabulary.
    """
    source, heat, max_gap = row
    gap = quotient(distances_in(source, index), inverse_of(heat))
    return tl.where(gap > max_gap, INF, gap)


@triton.jit
def distance_upto(gap, heat):
    """Return the largest fp32 distance whose gap is no more than fp32 `gap`, not negative.

    Distances are in the order of their gaps, so what is up to a gap can be told without dividing.
    The quotient that rounds no more to this gap is halfway to the next one; 25 bits, whose product
    with the temperature's 24 is exact in fp64. Halfway itself rounds to the even one of both.
    """
    bits = gap.to(tl.int32, bitcast=True)
    above = (bits + 1).to(tl.float32, bitcast=True)
    turn = (gap.to(tl.float64) + above.to(tl.float64)) * 0.5 * heat.to(tl.float64)
    found = turn.to(tl.float32)
    is_even = (bits & 1) == 0
    fits = (found.to(tl.float64) < turn) | ((found.to(tl.float64) == turn) & is_even)
    found = found.to(tl.int32, bitcast=True)
    return tl.where(fits, found, found - 1).to(tl.float32, bitcast=True)


@triton.jit
def farthest_of(max_gap, heat):
    """Return the largest distance that min_p lets in; all, if max_gap is infinite."""
    has_min_p = max_gap < INF
    return tl.where(has_min_p, distance_upto(tl.where(has_min_p, max_gap, 0.0), heat), INF)


@triton.jit
def reach_of(place, heat):
    """Return what is up to a place, -1 for nothing, as (upto, less, last) for `is_within`."""
    gap = gap_at(tl.maximum(place, 0))
    below = tl.maximum(gap.to(tl.int32, bitcast=True) - 1, 0).to(tl.float32, bitcast=True)
    upto = tl.where(place >= 0, distance_upto(gap, heat), -1.0)
    less = tl.where(gap > 0, distance_upto(below, heat), -1.0)
    return upto, less, id_at(place)


@triton.jit
def is_within(distance, index, reach):
    """Tell which tokens `index` are up to the place of a reach, by their distances."""
    upto, less, last = reach
    return distance <= tl.where(index <= last, upto, less)


@triton.jit
def exponent_of(heat):
    """Return the fp32 factor of distances by which 2 to the power is the exp of their gaps."""
    # Finite: no temperature is so small that the best token, at distance 0, is not first.
    return tl.minimum(inverse_of(heat) * _LOG2_E, 1e38).to(tl.float32)


@triton.jit
def place_of(gap, id):
    """Return the int64 by which tokens are ordered: smaller gaps come first, then lower ids."""
    # The bits of floats that are not negative order as integers do.
    return (gap.to(tl.int32, bitcast=True).to(tl.int64) << _ID_BITS) | id


@triton.jit
def id_at(place):
    """Return the int32 id in a place."""
    return (place & _ID_MASK).to(tl.int32)


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
def last_at(gap):
    """Return the last place of all with this gap."""
    return place_of(gap, 0) | _ID_MASK


@triton.jit
def weights_of(gap):
    """Return exp(-gap), fp32, 0 where a token is ruled out."""
    return tl.exp2(gap * -_LOG2_E)
