"""Who reads which keys in a decode step: the rules of the cut, and the plan of a step.

A *bundle* is the query heads that a program works on together: those of one KV head, or a part of
them where they are too many. A *pair* is a sequence and a bundle. Its keys are cut into *units*:
tiles of as many tokens as a program takes at a time, or whole splits where the spec fixes them.
The units of all pairs are laid end to end, sequence after sequence and in it bundle after bundle,
and each program of the split kernel gets an equal run of them, its *share*.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tvr.backends.triton.device import let_next_start, wait_for_inputs

#: Sequences, then programs, that the plan takes at a time.
PLAN_BLOCK = 1024


@triton.jit
def unit_tiles_of(tiles, max_splits, min_split_tiles):
    """Return the tiles of a fixed split; they follow from those of its sequence alone."""
    return tl.maximum(min_split_tiles, (tiles + max_splits - 1) // max_splits)


@triton.jit(
    do_not_specialize=[
        *("num_seqs", "num_bundles", "num_programs", "search_steps"),
        *("max_splits", "min_split_tiles", "solo_tiles", "even_above"),
    ]
)
def decode_plan_kernel(
    seq_lens,
    starts,
    leads,
    share_and_total,
    counters,
    num_seqs,
    num_bundles,
    num_programs,
    search_steps,
    max_splits,
    min_split_tiles,
    solo_tiles,
    even_above,
    TILE: tl.constexpr,
    FIXED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Cut a step into shares; one program, all int32.

    seq_lens [num_seqs]; starts [num_seqs + 1] gets the units of a bundle of the sequences before;
    leads [6, num_programs] where a program begins: the sequence, its start, the next one's start
    and its length, the bundle and the unit of the pair; share_and_total [2] the units of a program
    and of all pairs; counters zeros.

    A sequence without keys has a unit too, of no tokens: whoever gets it writes its zeros.
    """
    wait_for_inputs(PDL)
    let_next_start(PDL)
    lanes = tl.arange(0, BLOCK)
    done = 0
    longest = 0
    shortest = 1 << 30
    for first in range(0, num_seqs, BLOCK):
        seq = first + lanes
        inside = seq < num_seqs
        length = tl.load(seq_lens + seq, mask=inside, other=0)
        units = tl.maximum((length + TILE - 1) // TILE, 1)
        if FIXED:
            unit_tiles = unit_tiles_of(units, max_splits, min_split_tiles)
            units = (units + unit_tiles - 1) // unit_tiles
        units = tl.where(inside, units, 0)
        tl.store(starts + seq, done + tl.cumsum(units, 0) - units, mask=inside)
        done += tl.sum(units, 0)
        longest = tl.maximum(longest, tl.max(units, 0))
        shortest = tl.minimum(shortest, tl.min(tl.where(inside, units, 1 << 30), 0))
    tl.store(starts + num_seqs, done)
    total = done * num_bundles
    share = tl.maximum((total + num_programs - 1) // num_programs, 1)
    if not FIXED:
        # To merge partial results through memory takes about as long as reading a few tiles: where
        # all sequences are as short as that, pairs stay whole.
        share = tl.maximum(share, tl.where(longest <= solo_tiles, longest, 1))
        # Of equal sequences, a slightly larger share may end where pairs end, or cut them evenly.
        pieces = tl.maximum(longest // share, 1)
        even = tl.where(share < longest, longest // pieces, tl.cdiv(share, longest) * longest)
        is_even = (shortest == longest) & (longest % pieces == 0)
        if is_even & (even - share <= share // even_above):
            share = even
    tl.store(share_and_total, share)
    tl.store(share_and_total + 1, total)
    num_counters = total if FIXED else num_programs
    for first in range(0, num_counters, BLOCK):
        counter = first + lanes
        tl.store(counters + counter, tl.full([BLOCK], 0, tl.int32), mask=counter < num_counters)
    tl.debug_barrier()  # the starts are written, by any thread
    for first in range(0, num_programs, BLOCK):
        program = first + lanes
        # In all bundles of a sequence the same: starts[seq] <= unit < starts[seq + 1].
        unit = program * share // num_bundles
        inside = (program < num_programs) & (unit < done)
        low = tl.full([BLOCK], 0, tl.int32)
        high = low + num_seqs
        for _ in range(search_steps):
            middle = (low + high) // 2
            is_behind = tl.load(starts + middle, mask=inside, other=0) <= unit
            low = tl.where(is_behind, middle, low)
            high = tl.where(is_behind, high, middle)
        start = tl.load(starts + low, mask=inside, other=0)
        next_start = tl.load(starts + low + 1, mask=inside, other=1)
        of_seq = program * share - start * num_bundles
        bundle = of_seq // (next_start - start)
        tl.store(leads + program, low, mask=inside)
        tl.store(leads + num_programs + program, start, mask=inside)
        tl.store(leads + 2 * num_programs + program, next_start, mask=inside)
        length = tl.load(seq_lens + low, mask=inside, other=0)
        tl.store(leads + 3 * num_programs + program, length, mask=inside)
        tl.store(leads + 4 * num_programs + program, bundle, mask=inside)
        of_pair = of_seq - bundle * (next_start - start)
        tl.store(leads + 5 * num_programs + program, of_pair, mask=inside)
