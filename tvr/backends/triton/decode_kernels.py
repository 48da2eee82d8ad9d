"""The kernel of flash decoding: programs work off shares of keys, and merge where these end.

The state of some keys is (o, m, mass): with weights 2^(score - m), mass is their sum, and o the
weighted sum of values. States of a head are merged by bringing them to the larger m, in any
grouping, and only the last is normalised: o / mass, and lse = ln 2 (m + log2(mass)). A state of no
keys has m -inf and weighs nothing. States are fp32.

Source: Dao et al., Flash-Decoding (2023), for the split; equal runs of tiles are the "stream-K" of
Osama et al. (2023), there for matrix products.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tvr.backends.triton.decode_plan import unit_tiles_of
from tvr.backends.triton.device import LN_2, let_next_start, wait_for_inputs

#: Query heads of a bundle, at most: rows of the smallest product on tensor cores.
BUNDLE = 16

#: fp32 values of partial results that are on their way at once.
_MERGED_VALUES = tl.constexpr(8192)

_BUNDLE = tl.constexpr(BUNDLE)
_LN_2 = tl.constexpr(LN_2)

#: Below it no maximum is taken as a base of weights: (-inf) - (-inf) would be NaN.
_LOWEST = tl.constexpr(-3.4e38)


@triton.jit
def sum_slices(x, SLICES: tl.constexpr):
    """Return the sum of x [SLICES, R, C] over its slices, each of which a warp has.

    Halves are split off until one is left, which brings all values of a sum into one thread;
    `tl.sum` would go through shared memory several times.
    """
    ROWS: tl.constexpr = x.shape[1]
    COLUMNS: tl.constexpr = x.shape[2]
    x = tl.permute(x, (1, 2, 0))
    for i in tl.static_range(SLICES.bit_length() - 1):
        x = tl.reshape(x, [ROWS, COLUMNS, SLICES >> i + 1, 2])
        even, odd = tl.split(x)
        x = even + odd
    return tl.reshape(x, [ROWS, COLUMNS])


@triton.jit
def store_result(o, m, mass, out, lse, rows, is_row, HEAD_DIM: tl.constexpr):
    """Write the state o [R, C], m [R], mass [R] of some rows to out, and to lse unless it is None.

    A row of no keys gives zeros and lse -inf.
    """
    channel = tl.arange(0, o.shape[1])
    filled = tl.where(mass == 0.0, 1.0, mass)
    result = o / filled[:, None]
    places = out + rows[:, None] * HEAD_DIM + channel[None, :]
    inside = is_row[:, None] & (channel < HEAD_DIM)[None, :]
    tl.store(places, result.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        # Of no keys, m is -inf, and so is the sum.
        tl.store(lse + rows, (m + tl.log2(filled)) * _LN_2, mask=is_row)


@triton.jit
def slot_of(first, i, FIXED: tl.constexpr):
    """Return where the i-th partial of a pair lies among all partials.

    Fixed splits are a partial each, and `first` is the pair's first unit. Shares cut a pair
    anywhere, so it has a partial for each program that has some of it, from program `first` on. A
    program has at most two: of the pair that it goes on with from the program before (2 *
    program), and of the one that it leaves to the next (2 * program + 1).
    """
    if FIXED:
        return first + i
    else:
        return 2 * (first + i) + (i == 0)


@triton.jit
def merge(
    first,
    num_partials,
    partial_o,
    partial_m,
    partial_mass,
    bundle_size,
    out,
    lse,
    first_head,
    num_heads,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Merge the partials of a pair, in the order of the keys, and write the result.

    The pair's rows of out and lse are the num_heads from first_head on.
    """
    CHANNELS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    PARTIALS: tl.constexpr = _MERGED_VALUES // (ROWS * CHANNELS)
    row = tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.full([ROWS], 0.0, tl.float32)
    o = tl.full([ROWS, CHANNELS], 0.0, tl.float32)
    for i in range(0, num_partials, PARTIALS):
        partial = i + tl.arange(0, PARTIALS)
        slot = tl.cast(slot_of(first, partial, FIXED), tl.int64)
        rows = slot[:, None] * bundle_size + row[None, :]
        exists = (partial < num_partials)[:, None] & (row < num_heads)[None, :]
        inside = exists[:, :, None] & (channel < HEAD_DIM)[None, None, :]
        places = rows[:, :, None] * HEAD_DIM + channel[None, None, :]
        some_m = tl.load(partial_m + rows, mask=exists, other=float("-inf"))
        some_mass = tl.load(partial_mass + rows, mask=exists, other=0.0)
        some_o = tl.load(partial_o + places, mask=inside, other=0.0)
        new_m = tl.maximum(m, tl.max(some_m, 0))
        base = tl.maximum(new_m, _LOWEST)
        weight = tl.exp2(some_m - base[None, :])
        rescale = tl.exp2(m - base)
        mass = mass * rescale + tl.sum(some_mass * weight, 0)
        o = o * rescale[:, None] + tl.sum(some_o * weight[:, :, None], 0)
        m = new_m
    store_result(o, m, mass, out, lse, first_head + row, row < num_heads, HEAD_DIM)


@triton.jit(
    do_not_specialize=[
        *("num_seqs", "num_programs", "num_heads", "num_bundles", "num_parts", "group_size"),
        *("block_shift", "table_stride", "max_splits", "min_split_tiles"),
    ]
)
def split_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    starts,
    leads,
    share_and_total,
    counters,
    partial_o,
    partial_m,
    partial_mass,
    out,
    lse,
    scale_log2,
    q_seq_stride,
    q_head_stride,
    k_block_stride,
    v_block_stride,
    table_stride,
    num_seqs,
    num_programs,
    num_heads,
    num_bundles,
    num_parts,
    group_size,
    block_shift,
    max_splits,
    min_split_tiles,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    SLICES: tl.constexpr,
    ROWS: tl.constexpr,
    FIXED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program attends over its share of all sequences' keys.

    q [num_seqs, num_heads, HEAD_DIM], out the same, contiguous; caches [num_blocks, num_kv_heads,
    block_size, HEAD_DIM]; block_table [num_seqs, max_blocks]; lse [num_seqs, num_heads] fp32 or
    None; the plan's arrays as decode_plan.py has them; partial_o [slots, bundle_size, HEAD_DIM],
    partial_m and partial_mass [slots, bundle_size], fp32.

    A tile is cut into SLICES, one a warp, each with a state of its own: so warps need not exchange
    maxima and weights at every tile, and merge only where a pair ends.
    """
    CHANNELS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    SLICE: tl.constexpr = TILE // SLICES
    dtype: tl.constexpr = k_cache.dtype.element_ty
    wait_for_inputs(PDL)
    let_next_start(PDL)
    program = tl.program_id(0)
    share = tl.load(share_and_total)
    total = tl.load(share_and_total + 1)
    seq = tl.load(leads + program)
    start = tl.load(leads + num_programs + program)
    next_start = tl.load(leads + 2 * num_programs + program)
    length = tl.load(leads + 3 * num_programs + program)
    unit = program * share
    end = tl.minimum(unit + share, total)

    channel = tl.arange(0, CHANNELS)
    row = tl.arange(0, _BUNDLE)
    block_mask = (1 << block_shift) - 1
    token_of_tile = tl.arange(0, SLICES)[:, None] * SLICE + tl.arange(0, SLICE)[None, :]
    bundle_size = tl.minimum(group_size, _BUNDLE)
    while unit < end:
        num_units = next_start - start
        of_seq = unit - start * num_bundles
        bundle = of_seq // num_units
        of_pair = of_seq - bundle * num_units
        if FIXED:
            take = 1
            tiles = (length + TILE - 1) // TILE
            tokens_of_unit = unit_tiles_of(tiles, max_splits, min_split_tiles) * TILE
        else:
            take = tl.minimum(num_units - of_pair, end - unit)
            tokens_of_unit = TILE
        kv_head = bundle // num_parts
        first_row = (bundle - kv_head * num_parts) * _BUNDLE
        is_row = first_row + row < group_size
        first_head = kv_head * group_size + first_row
        seq_long = tl.cast(seq, tl.int64)

        # First the block ids, since keys and values wait for them, then all that need not.
        first_token = of_pair * tokens_of_unit
        last_token = tl.minimum(length, first_token + take * tokens_of_unit)
        table = block_table + seq_long * table_stride
        token = first_token + token_of_tile
        pages = tl.load(table + (token >> block_shift), mask=token < last_token, other=0)
        q_rows = q + seq_long * q_seq_stride + (first_head + row) * q_head_stride
        is_output = is_row[:, None] & (channel < HEAD_DIM)[None, :]
        queries = tl.load(q_rows[:, None] + channel[None, :], mask=is_output, other=0.0)
        queries = tl.broadcast_to(queries[None], [SLICES, _BUNDLE, CHANNELS])
        k_head = k_cache + (kv_head << block_shift) * HEAD_DIM
        v_head = v_cache + (kv_head << block_shift) * HEAD_DIM

        m = tl.full([SLICES, _BUNDLE], float("-inf"), tl.float32)
        mass = tl.full([SLICES, _BUNDLE], 0.0, tl.float32)
        o = tl.full([SLICES, _BUNDLE, CHANNELS], 0.0, tl.float32)
        for tile_token in range(first_token, last_token, TILE):
            token = tile_token + token_of_tile
            # Rows past the end must be zeros, not be weighted with zero: they may hold NaN.
            valid = token < last_token
            inside = valid[:, :, None] & (channel < HEAD_DIM)[None, None, :]
            page = pages.to(tl.int64)
            within = ((token & block_mask) * HEAD_DIM)[:, :, None] + channel[None, None, :]
            k = tl.load(k_head + (page * k_block_stride)[:, :, None] + within, inside, other=0.0)
            v = tl.load(v_head + (page * v_block_stride)[:, :, None] + within, inside, other=0.0)
            # Block ids are loaded a tile ahead, for addresses not to wait for them.
            ahead = token + TILE
            pages = tl.load(table + (ahead >> block_shift), mask=ahead < last_token, other=0)

            score = tl.dot(queries, tl.permute(k, (0, 2, 1)), input_precision="ieee")
            score = tl.where(valid[:, None, :], score * scale_log2, float("-inf"))
            new_m = tl.maximum(m, tl.max(score, 2))
            base = tl.maximum(new_m, _LOWEST)
            weight = tl.exp2(score - base[:, :, None])
            rescale = tl.exp2(m - base)
            mass = mass * rescale + tl.sum(weight, 2)
            o = o * rescale[:, :, None]
            o += tl.dot(weight.to(dtype), v, input_precision="ieee")
            m = new_m

        pair_m = tl.max(m, 0)
        weight = tl.exp2(m - tl.maximum(pair_m, _LOWEST)[None, :])
        pair_mass = tl.sum(mass * weight, 0)
        pair_o = sum_slices(o * weight[:, :, None], SLICES)
        first_unit = unit - of_pair
        if FIXED:
            first, num_partials = first_unit, num_units
        else:
            first = first_unit // share
            num_partials = (first_unit + num_units - 1) // share - first + 1
        heads = seq_long * num_heads + first_head
        if num_partials == 1:
            store_result(pair_o, pair_m, pair_mass, out, lse, heads + row, is_row, HEAD_DIM)
        else:
            slot = slot_of(first, (unit if FIXED else program) - first, FIXED)
            rows = tl.cast(slot, tl.int64) * bundle_size + row
            places = partial_o + rows[:, None] * HEAD_DIM + channel[None, :]
            tl.store(places, pair_o, mask=is_output)
            tl.store(partial_m + rows, pair_m, mask=is_row)
            tl.store(partial_mass + rows, pair_mass, mask=is_row)
            # Whoever is the last to count sees all that was written before the others counted.
            tl.debug_barrier()  # by every thread of this program
            num_before = tl.atomic_add(counters + first, 1, sem="acq_rel")
            if num_before == num_partials - 1:
                tl.store(counters + first, 0)  # for the next layer
                num_rows = tl.minimum(bundle_size, group_size - first_row)
                merge(
                    first,
                    num_partials,
                    partial_o,
                    partial_m,
                    partial_mass,
                    bundle_size,
                    out,
                    lse,
                    heads,
                    num_rows,
                    HEAD_DIM,
                    ROWS,
                    FIXED,
                )
        unit += take
        if of_seq + take == num_units * num_bundles:
            seq += 1
            start = next_start
            inside = seq < num_seqs
            next_start = tl.load(starts + seq + 1, mask=inside, other=0)
            length = tl.load(seq_lens + seq, mask=inside, other=0)
