"""Which token of a row is drawn: the one whose noise leaves most over its gap.

A token's score is `noise - gap`, and noise is `-log(-log(u))`: two logarithms in fp64. But the
score is -log of a time, `-log(u) exp(gap)`, and with u = 1 - v that time is at least `v exp(gap)`.
So each lane keeps its two least such bounds, in fp32, and the time of one token suffices to know
that all the others come later. Only where it does not are scores compared.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tvr.backends.triton.argmax import key_of
from tvr.backends.triton.sample_random import (
    gumbel_noise,
    waiting_times,
    words_of_ids,
    words_of_tile,
)
from tvr.backends.triton.sample_rows import (
    INF,
    distances_in,
    distances_of,
    exponent_of,
    farthest_of,
    gaps_in,
    is_within,
    loaded_in,
    place_of,
    reach_of,
)

NO_KEY = tl.constexpr(-(2**63))  # below any number's
LAST = tl.constexpr(2**62)  # behind any place

_ALL_BITS = tl.constexpr(0xFFFFFFFF)
_WORDS = tl.constexpr(2.0**32)

# The best token's bound is below 2^32, and no noise makes up for 2^48 times its weight: from here
# on tokens are not drawn. Powers end above, so that nothing overflows.
_TOO_LATE = tl.constexpr((80 + 127) << 23)  # the bits of 2^80
_LARGEST_POWER = tl.constexpr(90.0)


@triton.jit
def drawn_of(row, ids, limit, seed, position):
    """Return the key and the place of the token with the largest score of ids [n] int32.

    An id of -1 is none, nor are those at places behind `limit`; without any the place is LAST.
    Scores are exact, and of equals the lowest id is taken.
    """
    gap = gaps_in(row, ids)
    place = place_of(gap, ids)
    key = key_of(gumbel_noise(words_of_ids(seed, position, ids)) - gap, ids)
    key = tl.where((ids >= 0) & (place <= limit), key, NO_KEY)
    largest = tl.max(key, axis=0)
    is_it = (key == largest) & (key > NO_KEY)
    return largest, tl.min(tl.where(is_it, place, LAST), axis=0)


@triton.jit
def time_of(row, token, seed, position):
    """Return the time, fp32, of one token, in the units of bounds: 2^-32."""
    source, heat, _ = row
    wait = waiting_times(words_of_ids(seed, position, token)).to(tl.float32)
    return wait * tl.exp2(distances_in(source, token) * exponent_of(heat)) * _WORDS


@triton.jit
def winner_of(
    row,
    limit,
    seed,
    position,
    first_tile,
    num_tiles,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    LIMITED: tl.constexpr,
    CLOSE: tl.constexpr,
):
    """Return the place of the token that is drawn from some tiles.

    Args:
        limit: the last place that is looked at; LAST unless LIMITED.
        first_tile, num_tiles: of BLOCK tokens each; TILES, a power of two, or fewer.
        CLOSE: by which factor of two times the earlier one is known, for what rounding does.

    The place is LAST where no token of the tiles may be drawn.
    """
    source, heat, max_gap = row
    column = tl.arange(0, BLOCK)
    factor = exponent_of(heat)
    if LIMITED:
        reach = reach_of(limit, heat)
    else:
        farthest = farthest_of(max_gap, heat)
    # Bounds, as integers, which order as they do: in the lowest bits is the tile.
    TILE_BITS: tl.constexpr = TILES - 1
    first = tl.full([BLOCK], _TOO_LATE, tl.int32)
    second = tl.full([BLOCK], _TOO_LATE, tl.int32)
    next_x, next_counted = loaded_in(source, first_tile * BLOCK + column)
    for tile in range(num_tiles):
        begin = (first_tile + tile) * BLOCK
        index = begin + column
        distance = distances_of(source, next_x, next_counted)
        next_x, next_counted = loaded_in(source, index + BLOCK)
        if LIMITED:
            distance = tl.where(is_within(distance, index, reach), distance, INF)
        elif max_gap < INF:
            distance = tl.where(distance <= farthest, distance, INF)
        power = tl.minimum(distance * factor, _LARGEST_POWER)
        v = (words_of_tile(seed, position, begin, BLOCK) ^ _ALL_BITS).to(tl.float32) + 0.5
        bound = v * tl.exp2(power)
        key = (bound.to(tl.int32, bitcast=True) & ~TILE_BITS) | tile
        second = tl.minimum(second, tl.maximum(first, key))
        first = tl.minimum(first, key)
    drawn = tl.cast(LAST, tl.int64)
    earliest = tl.min(first, axis=0)
    if earliest < _TOO_LATE:
        lane = tl.min(tl.where(first == earliest, column, BLOCK), axis=0)
        token = (first_tile + (earliest & TILE_BITS)) * BLOCK + lane
        until = time_of(row, token, seed, position) * CLOSE
        others = tl.min(tl.where(column == lane, second, first), axis=0)
        rivals = (others & ~TILE_BITS).to(tl.float32, bitcast=True) <= until
        if rivals:
            # The first of each lane, or every token where a lane may have two.
            seconds = tl.min(second, axis=0) & ~TILE_BITS
            in_a_lane = seconds.to(tl.float32, bitcast=True) <= until
            best_key = tl.cast(NO_KEY, tl.int64)
            for tile in range(tl.where(in_a_lane, num_tiles, 1)):
                of_lanes = (first_tile + (first & TILE_BITS)) * BLOCK + column
                of_lanes = tl.where(first < _TOO_LATE, of_lanes, -1)
                of_tile = (first_tile + tile) * BLOCK + column
                ids = tl.where(in_a_lane, of_tile, of_lanes)
                key, place = drawn_of(row, ids, limit, seed, position)
                if key > best_key:
                    best_key = key
                    drawn = place
        else:
            drawn = place_of(gaps_in(row, token), token)
    return drawn
