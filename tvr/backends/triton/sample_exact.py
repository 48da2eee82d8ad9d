"""Where the tokens that the filters keep end, to the last one: a program goes through a row."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tvr.backends.triton.sample_race import LAST
from tvr.backends.triton.sample_rows import INF, gaps_in, place_of


@triton.jit
def last_of_best(row, k, num_tiles, BLOCK: tl.constexpr):
    """Return a place up to which there are `k` tokens, found digit by digit from the highest.

    Where there are fewer that no filter rules out, it is behind all of them.
    """
    column = tl.arange(0, BLOCK)
    digits = tl.arange(0, 256)
    prefix = tl.cast(0, tl.int64)
    left = k
    limit = tl.cast(LAST, tl.int64)
    shift = 48
    while shift >= 0:
        found = tl.zeros([256], tl.int32)
        for tile in range(num_tiles):
            index = tile * BLOCK + column
            gap = gaps_in(row, index)
            place = place_of(gap, index)
            fits = (gap < INF) & (place >> (shift + 8) == prefix)
            if tl.max(fits.to(tl.int32), axis=0) > 0:
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
def mass_until(row, limit, num_tiles, BLOCK: tl.constexpr):
    """Return the sum of weights, fp64, of tokens at places up to `limit`."""
    column = tl.arange(0, BLOCK)
    mass = tl.zeros([BLOCK], tl.float64)
    for tile in range(num_tiles):
        index = tile * BLOCK + column
        gap = gaps_in(row, index)
        is_before = (gap < INF) & (place_of(gap, index) <= limit)
        if tl.max(is_before.to(tl.int32), axis=0) > 0:
            mass += tl.where(is_before, tl.exp(-gap.to(tl.float64)), 0.0)
    return tl.sum(mass, axis=0)
