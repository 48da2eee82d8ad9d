"""The kernels of `sample` that decide: whether the token drawn first is taken, and which is."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tvr.backends.triton.argmax import id_of
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.sample_bracket import UNSURE, bracket_of, total_of
from tvr.backends.triton.sample_exact import last_of_best, mass_until
from tvr.backends.triton.sample_kernels import CLOSE, best_of, winner_in
from tvr.backends.triton.sample_race import LAST, winner_of
from tvr.backends.triton.sample_rows import INF, gap_at, id_at, logit_in, row_of, weights_of

_MOST_COUNTED = tl.constexpr(2 * (2**14 - 1))  # what int16 holds, the prompt's bit left out


@triton.jit(do_not_specialize=["best_parts", "race_parts", "parts"])
def pick_kernel(
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
    drawn_places,
    limits,
    searched,
    num_searched,
    logits_stride,
    counts_stride,
    vocab,
    tiles,
    best_parts,
    race_parts,
    parts,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program tells of a row whether the token that was drawn is taken.

    It writes the token's place to drawn_places [R] int64, and to limits [R] int64 -1 if it is
    taken. If it may not be among the k best, or not in the nucleus, the limit is the last place
    that may; and the row is appended to searched [R] int32, in no certain order.
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    slot = tl.arange(0, TILES)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.load(rows + i)
    best = logit_in(best_of(partials + i * KEYS, best_parts, KEYS))
    limit = tl.cast(-1, tl.int64)
    if (tl.load(temperature + row) > 0) & (tl.abs(best) < INF):
        penalties = (repetition, presence, frequency, counts)
        strides = (logits_stride, counts_stride, vocab)
        facts = row_of(i, row, best, logits, temperature, max_gap, *penalties, *strides)
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        seed, position = tl.load(seeds + row), tl.load(positions + i)
        drawn = winner_in(facts, winners + i * tiles, race_parts, seed, position, TILES)
        tl.store(drawn_places + i, drawn)
        has_k, has_p = k < vocab, p < 1.0
        if has_k | has_p:
            at = i * tiles + slot
            count = tl.sum(tl.load(counts_before + at, mask=slot < parts, other=0), axis=0)
            mass = total_of(masses_before + i * tiles, parts, TILES)
            total = total_of(masses + i * tiles, parts, TILES)
            # With both, the nucleus is one of the k best, whose mass is not known yet: it is no
            # less than that of those up to this token.
            least = tl.where(has_k, mass + weights_of(gap_at(drawn)), total)
            is_kept = (count < k) & ((has_p == 0) | (mass < (p - UNSURE) * least))
            if is_kept == 0:
                is_out = (count >= k) | (has_p & (mass >= (p + UNSURE) * total))
                limit = tl.where(is_out, drawn - 1, drawn)
                tl.store(searched + tl.atomic_add(num_searched, 1), i.to(tl.int32))
    tl.store(limits + i, limit)


@triton.jit(do_not_specialize=["best_parts", "parts", "round_stride"])
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
    winners,
    masses,
    drawn_places,
    limits,
    counts_upto,
    masses_upto,
    last_token,
    out,
    logits_stride,
    counts_stride,
    vocab,
    tiles,
    best_parts,
    parts,
    round_stride,
    chunks,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNKS: tl.constexpr,
    ROUNDS: tl.constexpr,
    MARKS: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes the token of a row: out [R] int64, -1 if the best logit is not finite.

    Where another one had to be drawn, it is looked at whether that one is kept for sure. If it is
    not, where the kept tokens end is found exactly. The token is stored in last_token [rows] int64
    and, in a row with penalties, in counts [rows, vocab].
    """
    i = tl.cast(tl.program_id(0), tl.int64)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    row = tl.load(rows + i)
    key = best_of(partials + i * KEYS, best_parts, KEYS)
    best = logit_in(key)
    token = id_of(key).to(tl.int32)
    penalties = (repetition, presence, frequency, counts)
    strides = (logits_stride, counts_stride, vocab)
    if tl.abs(best) < INF:
        if tl.load(temperature + row) > 0:
            drawn = tl.load(drawn_places + i)
            last = tl.load(limits + i)
            if last >= 0:
                facts = row_of(i, row, best, logits, temperature, max_gap, *penalties, *strides)
                k, p = tl.load(top_k + row), tl.load(top_p + row)
                seed, position = tl.load(seeds + row), tl.load(positions + i)
                total = total_of(masses + i * tiles, parts, TILES)
                upto = i * chunks * MARKS
                sums = (counts_upto + upto, masses_upto + upto, round_stride, chunks)
                low = bracket_of(last, total, k, p, vocab, *sums, ROUNDS, CHUNKS)[0]
                drawn = winner_in(facts, winners + i * tiles, chunks, seed, position, TILES)
                if gap_at(drawn) > low:
                    wide_tiles = tl.cdiv(tiles, WIDE)
                    limit = tl.cast(LAST, tl.int64)
                    if k < vocab:
                        limit = last_of_best(facts, k, wide_tiles, WIDE * BLOCK)
                    threshold = tl.cast(INF, tl.float64)
                    if p < 1.0:
                        threshold = p * mass_until(facts, limit, wide_tiles, WIDE * BLOCK)
                    searching = True
                    while searching:
                        if drawn > limit:
                            drawn = winner_of(
                                *(facts, limit, seed, position, 0, wide_tiles),
                                *(WIDE * BLOCK, TILES, True, CLOSE),
                            )
                        limit = drawn - 1
                        searching = False
                        if p < 1.0:
                            before = mass_until(facts, limit, wide_tiles, WIDE * BLOCK)
                            searching = before >= threshold
            token = id_at(drawn)
        repeat, present = tl.load(repetition + row), tl.load(presence + row)
        if (repeat != 1.0) | (present != 0.0) | (tl.load(frequency + row) != 0.0):
            counts += row * counts_stride
            seen = tl.load(counts + token).to(tl.int32)
            more = tl.where(seen < _MOST_COUNTED, seen + 2, seen)
            tl.store(counts + token, more.to(tl.int16))
    else:
        token = -1
    tl.store(out + i, token.to(tl.int64))
    tl.store(last_token + row, tl.maximum(token, 0).to(tl.int64))
