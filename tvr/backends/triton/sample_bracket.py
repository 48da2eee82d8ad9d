"""Between which gaps the tokens end that top_k and top_p keep, as far as sums at marks tell.

The tokens that are kept are the first ones in order of gaps. A bracket is a tuple:

    low, high          all tokens of gaps up to `low` are kept, none of a gap above `high`
    k_low, k_high      the same of the k best
    least, most        between which the mass is of which top_p keeps a share, that of the k best
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tvr.backends.triton.sample_rows import INF, gap_at

#: Gaps at which the tokens up to there are counted and weighed, in a round.
MARKS = tl.constexpr(16)
_HALF = tl.constexpr(8)

#: Sums of fp32 weights, of at most 2^-16 error, tell on which side of top_p a token is unless they
#: are this near, as a share of the whole; then fp64 sums do.
UNSURE = tl.constexpr(2.0**-14)


@triton.jit
def total_of(masses, parts, TILES: tl.constexpr):
    """Return the fp64 sum of masses [parts] fp32."""
    slot = tl.arange(0, TILES)
    return tl.sum(tl.load(masses + slot, mask=slot < parts, other=0.0).to(tl.float64), axis=0)


@triton.jit
def first_bracket(limit, total, has_k):
    """Return the bracket of a row of whose tokens none behind the place `limit` is kept."""
    low, high = tl.cast(-1.0, tl.float32), gap_at(limit)
    # The best token has weight 1.
    return low, high, low, high, tl.where(has_k, 1.0, total), total


@triton.jit
def marks_in(bracket, has_both):
    """Return MARKS gaps fp32, evenly in the bracket; half in that of the k best if both filter."""
    low, high, k_low, k_high, _, _ = bracket
    slot = tl.arange(0, MARKS)
    of_k = has_both & (slot >= _HALF)
    begin = tl.maximum(tl.where(of_k, k_low, low), 0.0)
    end = tl.where(of_k, k_high, high)
    share = (slot + 1).to(tl.float32) * (1.0 / (MARKS + 1))
    half_share = (slot % _HALF + 1).to(tl.float32) * (1.0 / (_HALF + 1))
    return tl.minimum(begin + (end - begin) * tl.where(has_both, half_share, share), end)


@triton.jit
def narrowed(bracket, marks, counts, masses, k, p, vocab):
    """Return the bracket after tokens up to `marks` were counted, int32, and weighed, fp64."""
    low, high, k_low, k_high, least, most = bracket
    few, many = counts <= k, counts >= k
    k_low = tl.maximum(k_low, tl.max(tl.where(few, marks, -1.0), axis=0))
    k_high = tl.minimum(k_high, tl.min(tl.where(many, marks, INF), axis=0))
    if k < vocab:
        least = tl.maximum(least, tl.max(tl.where(few, masses, 0.0), axis=0) * (1.0 - UNSURE))
        most = tl.minimum(most, tl.min(tl.where(many, masses, INF), axis=0) * (1.0 + UNSURE))
    is_kept = few & (masses <= tl.where(p < 1.0, (p - UNSURE) * least, INF))
    is_end = many | (masses >= tl.where(p < 1.0, (p + UNSURE) * most, INF))
    low = tl.maximum(low, tl.max(tl.where(is_kept, marks, -1.0), axis=0))
    high = tl.minimum(high, tl.min(tl.where(is_end, marks, INF), axis=0))
    return low, high, k_low, k_high, least, most


@triton.jit
def bracket_of(
    limit,
    total,
    k,
    p,
    vocab,
    counts_upto,
    masses_upto,
    round_stride,
    chunks,
    ROUNDS: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Return the bracket of a row after ROUNDS rounds of marks.

    counts_upto int32, masses_upto fp32: those of the row, [rounds, chunks, MARKS] of a chunk of its
    tokens each, rounds being `round_stride` apart.
    """
    slot = tl.arange(0, CHUNKS)[:, None]
    at = slot * MARKS + tl.arange(0, MARKS)[None, :]
    has_both = (k < vocab) & (p < 1.0)
    bracket = first_bracket(limit, total, k < vocab)
    for i in tl.static_range(ROUNDS):
        of_round = i * round_stride + at
        count = tl.load(counts_upto + of_round, mask=slot < chunks, other=0)
        mass = tl.load(masses_upto + of_round, mask=slot < chunks, other=0.0).to(tl.float64)
        sums = tl.sum(count, axis=0), tl.sum(mass, axis=0)
        bracket = narrowed(bracket, marks_in(bracket, has_both), *sums, k, p, vocab)
    return bracket
