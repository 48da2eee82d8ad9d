"""Causal attention of chunks of new tokens over the paged cache."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tvr.backends.triton.device import LN_2, let_next_start, wait_for_inputs

_LN_2 = tl.constexpr(LN_2)


@triton.jit
def first_slot(cu_seqlens_q, s, group_size, ROWS: tl.constexpr):
    """Return the first slot of sequence s, which may use all up to that of s + 1.

    Never too few, since floor(a + b) - floor(a) + 1 is at least ceil(b), and at most one too many.
    So no list of tiles has to be made, and a grid follows from the numbers of tokens and sequences.
    """
    return tl.load(cu_seqlens_q + s) * group_size // ROWS + s


@triton.jit
def sequence_of_slot(cu_seqlens_q, slot, num_seqs, group_size, ROWS: tl.constexpr):
    """Return the sequence whose slot this is: the last one that starts there or before.

    Sequences are counted, many at once: a binary search would wait for memory once a step.
    """
    SEQS: tl.constexpr = 128
    count = 0
    for first in range(0, num_seqs, SEQS):
        s = first + tl.arange(0, SEQS)
        inside = s < num_seqs
        start = tl.load(cu_seqlens_q + s, mask=inside, other=0) * group_size // ROWS + s
        count += tl.sum((inside & (start <= slot)).to(tl.int32), 0)
    return count - 1


@triton.jit
def tile_of(
    cache,
    new,
    blocks,
    block_stride,
    block_shift,
    first_key,
    num_keys,
    new_token,
    new_column,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NEW: tl.constexpr,
):
    """Return keys, or values, first_key to first_key + KEYS of a sequence: [KEYS, WIDTH].

    Args:
        cache: pointers [WIDTH] to what cache block 0 has of the KV head's first token.
        new: if NEW, the descriptor of this step's, where the sequence's key 0 would be in row
            new_token, the KV head in column new_column.
        blocks: the sequence's row of the block table.
        num_keys: that the program sees. What is behind them is not read, its place taken by the
            last key; of `new` it is, so that no tile may reach behind the sequence.
    """
    if NEW:
        return new.load([new_token + first_key, new_column])
    key = tl.minimum(first_key + tl.arange(0, KEYS), num_keys - 1)
    block = tl.load(blocks + (key >> block_shift)).to(tl.int64)
    in_block = (key & ((1 << block_shift) - 1)) * HEAD_DIM
    pointers = (block * block_stride + in_block)[:, None] + cache[None, :]
    if cache.shape[0] == HEAD_DIM:
        return tl.load(pointers)
    else:
        column = tl.arange(0, cache.shape[0])
        return tl.load(pointers, mask=(column < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def weigh(scores, first_key, seen_by_first, seen, scale_log2, base, total):
    """Turn scores [ROWS, KEYS] of the keys from first_key on into weights, all in fp32.

    Args:
        seen_by_first: keys that the program's first row sees, and with it every row.
        seen: [ROWS] keys that a row sees.
        base: [ROWS] the largest score so far times scale_log2; -inf: no key yet.
        total: [ROWS] sum of the weights so far.

    Returns the weights 2^(scale_log2 * score - base), the new base and total, and the factor
    [ROWS] that output so far must be multiplied by.
    """
    if first_key + scores.shape[1] > seen_by_first:
        key = first_key + tl.arange(0, scores.shape[1])
        scores = tl.where(key[None, :] < seen[:, None], scores, float("-inf"))
    # Products and sums are fused by hand: a row's bits may not depend on what a compiler makes of
    # the code around.
    new_base = tl.maximum(base, tl.max(scores, 1) * scale_log2)
    # Of a row that has seen no key, (-inf) - (-inf) would be NaN; its weights are 0.
    finite = tl.where(new_base == float("-inf"), 0.0, new_base)
    factor = tl.exp2(base - finite)
    weights = tl.exp2(tl.fma(scores, scale_log2, -finite[:, None]))
    return weights, new_base, tl.fma(total, factor, tl.sum(weights, 1)), factor


@triton.jit
def add_values(result, factor, weights, v):
    """Return result * factor + weights v: [ROWS, WIDTH] fp32, the weights rounded to v's dtype."""
    if v.dtype == tl.float32:
        # A tile has its own sum, or 131,072 keys would be added one after another.
        product = tl.dot(weights, v, input_precision="ieee")
        return tl.fma(result, factor[:, None], product)
    else:
        return tl.dot(weights.to(v.dtype), v, result * factor[:, None])


@triton.jit
def attend(
    queries,
    k_cache,
    v_cache,
    k_new,
    v_new,
    blocks,
    k_block_stride,
    v_block_stride,
    block_shift,
    new_token,
    new_column,
    first_key,
    end_key,
    num_keys,
    seen_by_first,
    seen,
    scale_log2,
    base,
    total,
    result,
    SIGN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    LAG: tl.constexpr,
    NEW: tl.constexpr,
):
    """Go through the tiles from first_key up to end_key. Returns base, total and result.

    If LAG is 1, the values of a tile are added at once. If it is 2, while the next tile is weighed:
    nothing there waits for the product, so that tensor cores and exponentials work side by side.
    """
    weights = tl.zeros([queries.shape[0], KEYS], tl.float32)
    factor = tl.full([queries.shape[0]], 1.0, tl.float32)
    for key in range(first_key, end_key, KEYS):
        # The first time round, weights of 0 for values that are weighed in the next.
        v_key = key if LAG == 1 else tl.maximum(key - KEYS, first_key)
        k = tile_of(
            *(k_cache, k_new, blocks, k_block_stride, block_shift, key, num_keys),
            *(new_token, new_column, KEYS, HEAD_DIM, NEW),
        )
        v = tile_of(
            *(v_cache, v_new, blocks, v_block_stride, block_shift, v_key, num_keys),
            *(new_token, new_column, KEYS, HEAD_DIM, NEW),
        )
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if SIGN != 1:
            scores = scores * SIGN
        if LAG == 2:
            result = add_values(result, factor, weights, v)
        weights, base, total, factor = weigh(
            scores, key, seen_by_first, seen, scale_log2, base, total
        )
        if LAG == 1:
            result = add_values(result, factor, weights, v)
    if LAG == 2 and first_key < end_key:
        v_key = first_key + (end_key - 1 - first_key) // KEYS * KEYS
        v = tile_of(
            *(v_cache, v_new, blocks, v_block_stride, block_shift, v_key, num_keys),
            *(new_token, new_column, KEYS, HEAD_DIM, NEW),
        )
        result = add_values(result, factor, weights, v)
    return base, total, result


# A step's table is as wide as its longest sequence needs.
@triton.jit(
    do_not_specialize=["table_stride", "num_seqs", "num_kv_heads", "group_size", "block_shift"]
)
def prefill_kernel(
    q,
    k,
    v,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    cu_seqlens_q,
    out,
    lse,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    v_block_stride,
    table_stride,
    num_seqs,
    num_kv_heads,
    group_size,
    block_shift,
    scale_log2,
    SIGN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LAG: tl.constexpr,
    NEW: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program takes ROWS rows of one sequence and one KV head, and goes through their keys.

    The query heads of a KV head are packed: row r of a sequence is its new token r // group_size,
    head r % group_size of the group. Scores, softmax and sums are fp32; weights are rounded to the
    dtype of the values for the second product. Tiles of KEYS keys start at key 0 for every row, and
    a key that a row does not see adds exactly 0: a row's bits follow from its own keys alone.

    Args:
        q: [num_tokens, num_heads, HEAD_DIM], strided.
        k, v: descriptors of this step's [num_tokens, num_kv_heads * HEAD_DIM], in tiles
            [KEYS, HEAD_DIM]; None if not NEW.
        k_cache, v_cache: [num_blocks, num_kv_heads, 1 << block_shift, HEAD_DIM].
        block_table: [num_seqs, table_stride] int32.
        seq_lens, cu_seqlens_q: [num_seqs], [num_seqs + 1] int32.
        out: [num_tokens, num_heads, HEAD_DIM].
        lse: [num_tokens, num_heads] fp32, or None.
        scale_log2: |scale| * log2(e), and 1 for a scale of 0: the largest score stays the largest.
        SIGN: of the scale, 1, 0 or -1.
        WIDTH: HEAD_DIM rounded up to a power of two; columns behind HEAD_DIM are zeros.
        LAG: see attend.
        NEW: keys and values of this step are read from k and v where that can be.
    """
    wait_for_inputs(PDL)
    let_next_start(PDL)
    # Late tiles see the most keys and come first: what runs at the end, when there is too little
    # left to fill the device, is short. The KV heads of a tile are neighbours.
    kv_head = tl.program_id(0) % num_kv_heads
    slot = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_kv_heads
    s = sequence_of_slot(cu_seqlens_q, slot, num_seqs, group_size, ROWS)
    first_token = tl.load(cu_seqlens_q + s)
    q_len = tl.load(cu_seqlens_q + s + 1) - first_token
    first_row = (slot - first_slot(cu_seqlens_q, s, group_size, ROWS)) * ROWS
    num_rows = q_len * group_size
    if first_row >= num_rows:
        return

    row = first_row + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    inside = row < num_rows
    token = tl.cast(first_token, tl.int64) + row // group_size
    head = kv_head * group_size + row % group_size
    filled = inside[:, None] & (column < HEAD_DIM)[None, :]
    queries = tl.load(
        q + (token * q_token_stride + head * q_head_stride)[:, None] + column[None, :],
        mask=filled,
        other=0.0,
    )

    # The mask is aligned bottom-right. Rows that are only padding see more than the last row, and
    # nothing comes of it.
    first_position = tl.load(seq_lens + s) - q_len
    last_row = tl.minimum(first_row + ROWS, num_rows) - 1
    num_keys = tl.maximum(first_position + last_row // group_size + 1, 0)
    seen_by_first = first_position + first_row // group_size + 1
    seen = first_position + row // group_size + 1

    blocks = block_table + tl.cast(s, tl.int64) * table_stride
    head_start = tl.cast(kv_head, tl.int64) * HEAD_DIM << block_shift
    base = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    # Tiles of this step's keys alone lie in one piece in k and v; the rest is found through the
    # block table: what was cached before, and the last tile if it reaches behind the sequence.
    new_start = 0
    new_end = 0
    if NEW:
        # A whole tile's start, even if the rows see less: no tile may start elsewhere.
        new_start = tl.cdiv(tl.maximum(first_position, 0), KEYS) * KEYS
        whole = (first_position + q_len) // KEYS * KEYS
        new_end = tl.maximum(new_start, tl.minimum(tl.cdiv(num_keys, KEYS) * KEYS, whole))
    for part in tl.static_range(3):
        if NEW or part == 2:
            base, total, result = attend(
                *(queries, k_cache + head_start + column, v_cache + head_start + column, k, v),
                *(blocks, k_block_stride, v_block_stride, block_shift),
                *(first_token - first_position, kv_head * HEAD_DIM),
                0 if part == 0 else new_start if part == 1 else new_end,
                new_start if part == 0 else new_end if part == 1 else num_keys,
                *(num_keys, seen_by_first, seen, scale_log2, base, total, result),
                *(SIGN, HEAD_DIM, KEYS, LAG, part == 1),
            )

    # A row without keys gives zeros, and -inf, which is its base.
    total = tl.where(total == 0.0, 1.0, total)
    result = result / total[:, None]
    num_heads = num_kv_heads * group_size
    place = token * num_heads + head
    tl.store(
        out + place[:, None] * HEAD_DIM + column[None, :],
        result.to(out.dtype.element_ty),
        mask=filled,
    )
    if lse is not None:
        tl.store(
            lse + place, (base + tl.log2(tl.where(total == 0.0, 1.0, total))) * _LN_2, mask=inside
        )
