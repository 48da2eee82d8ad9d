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

#: Tokens of a tile that a warp takes, all of one block: the smallest blocks have as many.
SLICE = 16

#: Query heads of a bundle, at most: rows of the smallest product on tensor cores.
BUNDLE = 16

#: fp32 values of partial results that are on their way at once.
_MERGED_VALUES = tl.constexpr(16384)

#: Of 16 rows, and of as many warps.
_MOST_HALVINGS = tl.constexpr(4)

#: Partials that are weighed at a time.
_WEIGHED = tl.constexpr(32)

_BUNDLE = tl.constexpr(BUNDLE)
_SLICE = tl.constexpr(SLICE)
_LN_2 = tl.constexpr(LN_2)

#: Below it no maximum is taken as a base of weights: (-inf) - (-inf) would be NaN.
_LOWEST = tl.constexpr(-3.4e38)


@triton.jit
def first_rows(x, ROWS: tl.constexpr):
    """Return the first ROWS rows of x [R, C, S]."""
    for _ in tl.static_range(_MOST_HALVINGS):
        if x.shape[0] > ROWS:
            x = tl.reshape(x, [2, x.shape[0] // 2, x.shape[1], x.shape[2]])
            x, _ = tl.split(tl.permute(x, (1, 2, 3, 0)))
    return x


@triton.jit
def merge_masses(m0, mass0, m1, mass1):
    """Return m and mass of two states together."""
    m = tl.maximum(m0, m1)
    base = tl.maximum(m, _LOWEST)
    return m, mass0 * tl.exp2(m0 - base) + mass1 * tl.exp2(m1 - base)


@triton.jit
def sum_slices(x, ROWS: tl.constexpr):
    """Return the sum of x [S, R, C] over its slices, each of which a warp has: its first ROWS rows.

    Halves are split off until one is left, which brings all values of a sum into one thread;
    `tl.sum` would go through shared memory several times.
    """
    x = first_rows(tl.permute(x, (1, 2, 0)), ROWS)
    for _ in tl.static_range(_MOST_HALVINGS):
        if x.shape[2] > 1:
            even, odd = tl.split(tl.reshape(x, [ROWS, x.shape[1], x.shape[2] // 2, 2]))
            x = even + odd
    return tl.reshape(x, [ROWS, x.shape[1]])


@triton.jit
def filled(mass):
    """Return what to divide by: of no keys, o is 0 and stays so."""
    return tl.where(mass == 0.0, 1.0, mass)


@triton.jit
def store_result(o, m, mass, out, lse, first_head, num_rows, HEAD_DIM: tl.constexpr):
    """Write num_rows rows of o [R, C], which is normalised, to out, and to lse unless it is None.

    m and mass [R'] are those of the rows, R' being R or more.
    """
    row, channel = tl.arange(0, o.shape[0]), tl.arange(0, o.shape[1])
    places = out + (first_head + row)[:, None] * HEAD_DIM + channel[None, :]
    inside = (row < num_rows)[:, None] & (channel < HEAD_DIM)[None, :]
    tl.store(places, o.to(out.dtype.element_ty), mask=inside)
    if lse is not None:
        row = tl.arange(0, m.shape[0])
        # Of no keys, m is -inf, and so is the sum.
        tl.store(lse + first_head + row, (m + tl.log2(filled(mass))) * _LN_2, mask=row < num_rows)


@triton.jit
def slot_of(i, FIXED: tl.constexpr):
    """Return where the i-th partial of a pair lies, from the pair's first slot on.

    Fixed splits are a partial each, one after the other from the pair's first unit on. Shares cut a
    pair anywhere, so it has a partial for each program that has some of it, from one on. A program
    has at most two: of the pair that it goes on with from the program before, in slot 2 * program,
    and of the one that it leaves to the next, in the slot after.
    """
    if FIXED:
        return i
    else:
        return 2 * i + (i == 0)


@triton.jit
def load_partials(
    partial_o,
    i,
    num_partials,
    num_heads,
    PARTIALS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Return o [ROWS, PARTIALS, C] of a pair's partials from the i-th on."""
    row = tl.arange(0, ROWS)[:, None]
    partial = i + tl.arange(0, PARTIALS)[None, :]
    channel = tl.arange(0, triton.next_power_of_2(HEAD_DIM))
    places = (slot_of(partial, FIXED) * ROWS + row) * HEAD_DIM
    exists = (partial < num_partials) & (row < num_heads)
    inside = exists[:, :, None] & (channel < HEAD_DIM)[None, None, :]
    return tl.load(partial_o + places[:, :, None] + channel, mask=inside, other=0.0)


@triton.jit
def merge(
    num_partials,
    partial_o,
    partial_mass,
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
    PARTIALS: tl.constexpr = min(_WEIGHED, _MERGED_VALUES // (ROWS * CHANNELS))
    row = tl.arange(0, ROWS)
    # On their way while weights are worked out.
    some_o = load_partials(
        *(partial_o, 0, num_partials, num_heads),
        *(PARTIALS, HEAD_DIM, ROWS, FIXED),
    )
    m = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.full([ROWS], 0.0, tl.float32)
    for i in range(0, num_partials, _WEIGHED):
        partial = i + tl.arange(0, _WEIGHED)
        rows = slot_of(partial, FIXED)[:, None] * ROWS + row
        exists = (partial < num_partials)[:, None] & (row < num_heads)
        some_m = tl.load(partial_mass + 2 * rows, mask=exists, other=float("-inf"))
        some_mass = tl.load(partial_mass + 2 * rows + 1, mask=exists, other=0.0)
        new_m = tl.maximum(m, tl.max(some_m, 0))
        base = tl.maximum(new_m, _LOWEST)
        mass = mass * tl.exp2(m - base) + tl.sum(some_mass * tl.exp2(some_m - base), 0)
        m = new_m
    o = tl.full([ROWS, CHANNELS], 0.0, tl.float32)
    for i in range(0, num_partials, PARTIALS):
        partial = i + tl.arange(0, PARTIALS)
        rows = slot_of(partial, FIXED)[:, None] * ROWS + row
        exists = (partial < num_partials)[:, None] & (row < num_heads)
        some_m = tl.load(partial_mass + 2 * rows, mask=exists, other=float("-inf"))
        weight = tl.exp2(some_m - tl.maximum(m, _LOWEST)) / filled(mass)
        o += tl.sum(some_o * tl.permute(weight, (1, 0))[:, :, None], 1)
        if i + PARTIALS < num_partials:
            some_o = load_partials(
                *(partial_o, i + PARTIALS, num_partials, num_heads),
                *(PARTIALS, HEAD_DIM, ROWS, FIXED),
            )
    store_result(o, m, mass, out, lse, first_head, num_heads, HEAD_DIM)


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
    None; the plan's arrays as decode_plan.py has them; partial_o [slots, ROWS, HEAD_DIM], and
    partial_mass [slots, ROWS, 2] with m and mass, fp32. ROWS are those of a bundle, 2^n.

    A tile is cut into SLICES, one a warp, each with a state of its own: so warps need not exchange
    maxima and weights at every tile, and merge only where a pair ends.
    """
    CHANNELS: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    dtype: tl.constexpr = k_cache.dtype.element_ty
    wait_for_inputs(PDL)
    let_next_start(PDL)
    program = tl.program_id(0)
    # Volatile, or the compiler has all others wait for the first two: is there any work?
    lead = leads + program
    share = tl.load(share_and_total, volatile=True)
    total = tl.load(share_and_total + 1, volatile=True)
    seq = tl.load(lead, volatile=True)
    start = tl.load(lead + num_programs, volatile=True)
    next_start = tl.load(lead + 2 * num_programs, volatile=True)
    length = tl.load(lead + 3 * num_programs, volatile=True)
    bundle = tl.load(lead + 4 * num_programs, volatile=True)
    of_pair = tl.load(lead + 5 * num_programs, volatile=True)
    unit = program * share
    end = tl.minimum(unit + share, total)

    channel = tl.arange(0, CHANNELS)
    row = tl.arange(0, _BUNDLE)
    head = tl.arange(0, ROWS)
    first_of_slice = tl.arange(0, SLICES) * _SLICE
    token_of_slice = tl.arange(0, _SLICE)
    within = token_of_slice[:, None] * HEAD_DIM + channel[None, :]
    block_mask = (1 << block_shift) - 1
    bundle_size = tl.minimum(group_size, _BUNDLE)
    while unit < end:
        num_units = next_start - start
        if FIXED:
            take = 1
            tiles = (length + TILE - 1) // TILE
            tokens_of_unit = unit_tiles_of(tiles, max_splits, min_split_tiles) * TILE
        else:
            take = tl.minimum(num_units - of_pair, end - unit)
            tokens_of_unit = TILE
        kv_head = bundle
        if num_parts > 1:
            kv_head = bundle // num_parts
        first_row = (bundle - kv_head * num_parts) * _BUNDLE
        first_head = kv_head * group_size + first_row
        seq_long = tl.cast(seq, tl.int64)

        # First the block ids, since keys and values wait for them, then all that need not.
        first_token = of_pair * tokens_of_unit
        last_token = tl.minimum(length, first_token + take * tokens_of_unit)
        table = block_table + seq_long * table_stride
        token = first_token + first_of_slice
        block = tl.load(table + (token >> block_shift), mask=token < last_token, other=0)
        token += TILE
        next_block = tl.load(table + (token >> block_shift), mask=token < last_token, other=0)
        q_rows = q + seq_long * q_seq_stride + (first_head + row) * q_head_stride
        is_query = (first_row + row < group_size)[:, None] & (channel < HEAD_DIM)[None, :]
        queries = tl.load(q_rows[:, None] + channel[None, :], mask=is_query, other=0.0)
        queries = tl.broadcast_to(queries[None], [SLICES, _BUNDLE, CHANNELS])
        k_head = k_cache + (kv_head << block_shift) * HEAD_DIM
        v_head = v_cache + (kv_head << block_shift) * HEAD_DIM

        m = tl.full([SLICES, _BUNDLE], float("-inf"), tl.float32)
        mass = tl.full([SLICES, _BUNDLE], 0.0, tl.float32)
        o = tl.full([SLICES, _BUNDLE, CHANNELS], 0.0, tl.float32)
        for tile_token in range(first_token, last_token, TILE):
            token = tile_token + first_of_slice
            # Rows past the end must be zeros, not be weighted with zero: they may hold NaN.
            valid = token[:, None] + token_of_slice[None, :] < last_token
            inside = valid[:, :, None] & (channel < HEAD_DIM)[None, None, :]
            of_block = (token & block_mask) * HEAD_DIM
            k_slice = k_head + (block.to(tl.int64) * k_block_stride + of_block)
            v_slice = v_head + (block.to(tl.int64) * v_block_stride + of_block)
            k = tl.load(k_slice[:, None, None] + within[None], inside, other=0.0)
            v = tl.load(v_slice[:, None, None] + within[None], inside, other=0.0)
            # Block ids are loaded two tiles ahead, for addresses not to wait for them.
            token += TILE
            block = tl.where(token < last_token, next_block, 0)
            token += TILE
            next_block = tl.load(table + (token >> block_shift), mask=token < last_token, other=0)

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

        first_unit = unit - of_pair
        if FIXED:
            first, num_partials = first_unit, num_units
        else:
            first = first_unit // share
            num_partials = (first_unit + num_units - 1) // share - first + 1
        pair_m, pair_mass = tl.reduce((m, mass), 0, merge_masses)
        weight = tl.exp2(m - tl.maximum(pair_m, _LOWEST)[None, :])
        if num_partials == 1:
            weight /= filled(pair_mass)[None, :]
        pair_o = sum_slices(o * weight[:, :, None], ROWS)
        heads = seq_long * num_heads + first_head
        num_rows = tl.minimum(bundle_size, group_size - first_row)
        if num_partials == 1:
            store_result(pair_o, pair_m, pair_mass, out, lse, heads, num_rows, HEAD_DIM)
        else:
            # The pair's first slot, and this program's.
            base = tl.cast(first if FIXED else 2 * first, tl.int64) * ROWS
            place = base + slot_of((unit if FIXED else program) - first, FIXED) * ROWS
            first_o, first_mass = partial_o + base * HEAD_DIM, partial_mass + 2 * base
            places = partial_o + (place + head)[:, None] * HEAD_DIM + channel[None, :]
            is_result = (head < num_rows)[:, None] & (channel < HEAD_DIM)[None, :]
            tl.store(places, pair_o, mask=is_result)
            places = partial_mass + 2 * (place + row)[:, None] + tl.arange(0, 2)[None, :]
            tl.store(places, tl.join(pair_m, pair_mass), mask=(row < num_rows)[:, None])
            # Whoever is the last to count sees all that was written before the others counted.
            tl.debug_barrier()  # by every thread of this program
            num_before = tl.atomic_add(counters + first, 1, sem="acq_rel")
            if num_before == num_partials - 1:
                tl.store(counters + first, 0)  # for the next layer
                merge(
                    num_partials,
                    first_o,
                    first_mass,
                    out,
                    lse,
                    heads,
                    num_rows,
                    HEAD_DIM,
                    ROWS,
                    FIXED,
                )
        unit += take
        of_pair += take
        if of_pair == num_units:
            of_pair = 0
            bundle += 1
            if bundle == num_bundles:
                bundle = 0
                seq += 1
                start = next_start
                is_seq = seq < num_seqs
                next_start = tl.load(starts + seq + 1, mask=is_seq, other=0)
                length = tl.load(seq_lens + seq, mask=is_seq, other=0)
