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
def weigh(scores, base, total, scale_log2):
    """Turn scores [M, N] into weights 2^(scale_log2 * score - base), all in fp32.

    Returns weights, the new base [M] (the largest score so far, -inf: no key yet), the factor that
    output so far must be multiplied by, and the new sum of weights [M].
    """
    # Each product with scale_log2 is fused with its sum, here and wherever this is inlined: a
    # row's bits may not depend on what a compiler makes of the code around.
    new_base = tl.maximum(base, tl.max(scores, 1) * scale_log2)
    # Of a row that has seen no key, (-inf) - (-inf) would be NaN; its weights are 0.
    finite = tl.where(new_base == float("-inf"), 0.0, new_base)
    factor = tl.exp2(base - finite)
    weights = tl.exp2(tl.fma(scores, scale_log2, -finite[:, None]))
    return weights, new_base, factor, tl.fma(total, factor, tl.sum(weights, 1))


@triton.jit
def prefill_kernel(
    q,
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
    PDL: tl.constexpr,
):
    """A program takes ROWS rows of one sequence and one KV head, and goes through their keys.

    The query heads of a KV head are packed: row r of a sequence is its new token r // group_size,
    head r % group_size of the group. Scores, softmax and sums are fp32; weights are rounded to the
    dtype of the values for the second product. Tiles of KEYS keys start at key 0 for every row, and
    a key that a row does not see adds exactly 0: a row's bits follow from its own keys alone.

    Args:
        q: [num_tokens, num_heads, HEAD_DIM], strided.
        k_cache, v_cache: [num_blocks, num_kv_heads, 1 << block_shift, HEAD_DIM].
        block_table: [num_seqs, table_stride] int32.
        seq_lens, cu_seqlens_q: [num_seqs], [num_seqs + 1] int32.
        out: [num_tokens, num_heads, HEAD_DIM].
        lse: [num_tokens, num_heads] fp32, or None.
        scale_log2: |scale| * log2(e), and 1 for a scale of 0: the largest score stays the largest.
        SIGN: of the scale, 1, 0 or -1.
        WIDTH: HEAD_DIM rounded up to a power of two; columns behind HEAD_DIM are zeros.
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

    # The mask is aligned bottom-right. Rows that are only padding see what the last row sees.
    first_position = tl.load(seq_lens + s) - q_len
    last_row = tl.minimum(first_row + ROWS, num_rows) - 1
    num_keys = first_position + last_row // group_size + 1
    num_keys_of_first = first_position + first_row // group_size + 1
    num_keys_of_row = first_position + row // group_size + 1

    blocks = block_table + tl.cast(s, tl.int64) * table_stride
    in_block = (1 << block_shift) - 1
    head_start = tl.cast(kv_head, tl.int64) * HEAD_DIM << block_shift
    keys = k_cache + head_start + column
    values = v_cache + head_start + column
    base = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    for first_key in range(0, num_keys, KEYS):
        key = first_key + tl.arange(0, KEYS)
        # Behind the last key it is read again, and hidden below: what lies there is never touched.
        place = tl.minimum(key, num_keys - 1)
        block = tl.load(blocks + (place >> block_shift)).to(tl.int64)
        at = (place & in_block) * HEAD_DIM
        k_at = (block * k_block_stride + at)[:, None] + keys[None, :]
        v_at = (block * v_block_stride + at)[:, None] + values[None, :]
        if HEAD_DIM == WIDTH:
            k = tl.load(k_at)
            v = tl.load(v_at)
        else:
            k = tl.load(k_at, mask=(column < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_at, mask=(column < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if SIGN != 1:
            scores = scores * SIGN
        # Keys that the first row sees are seen by all.
        if first_key + KEYS > num_keys_of_first:
            scores = tl.where(key[None, :] < num_keys_of_row[:, None], scores, float("-inf"))
        weights, base, factor, total = weigh(scores, base, total, scale_log2)
        if v.dtype == tl.float32:
            # A tile has its own sum, or 131,072 keys would be added one after another.
            product = tl.dot(weights, v, input_precision="ieee")
            result = tl.fma(result, factor[:, None], product)
        else:
            result = tl.dot(weights.to(v.dtype), v, result * factor[:, None])

    # A row without keys has sum 0 and gives zeros; log2(0) is -inf, and so is its base.
    result = result / tl.where(total == 0.0, 1.0, total)[:, None]
    num_heads = num_kv_heads * group_size
    place = token * num_heads + head
    tl.store(
        out + place[:, None] * HEAD_DIM + column[None, :],
        result.to(out.dtype.element_ty),
        mask=filled,
    )
    if lse is not None:
        tl.store(lse + place, (base + tl.log2(total)) * _LN_2, mask=inside)
