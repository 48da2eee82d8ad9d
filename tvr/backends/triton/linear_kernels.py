"""The kernels of `linear` and `fused_linear`: products with a weight that is read once.

They take at most 8 rows. Of one row `linear_plain_kernel` can do more: given a `norm_weight` it
norms x first, with SILU it stores `silu_mul` of the product, given a `residual` its sum with that;
each part rounds where the op of its name does. What is not wanted is None.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl

from tvr.backends.triton.activation import silu_times
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.norm import scaled


@triton.jit(do_not_specialize=["num_rows"])
def linear_plain_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    in_features,
    out_features,
    x_stride,
    weight_stride,
    norm_weight,
    eps,
    residual,
    residual_stride,
    ROWS: tl.constexpr,
    PACK: tl.constexpr,
    TILES: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = x @ weight^T + bias by multiply-adds in fp32; a program takes BN output features.

    x [num_rows, in_features], weight [out_features, in_features], bias [out_features] or None,
    out [num_rows, out_features]; num_rows is at most ROWS, TILES * BK at least in_features.
    norm_weight [in_features] or None; residual, as out, or None.

    A thread keeps to the columns of its loads of PACK numbers, and sums them for each weight row
    and each row of x by itself: only what is left at the end goes from thread to thread.
    """
    let_next_start(PDL)
    column = tl.arange(0, BK)[None, None, :]
    feature = tl.program_id(0) * BN + tl.arange(0, BN)
    weight_row = row_of_weight(feature, out_features, SILU)
    weight_at = weight + weight_row.to(tl.int64)[None, :, None] * weight_stride + column
    # Weights are no kernel's results, and take longest: on their way before the wait.
    weights = tl.load(
        weight_at, mask=column < in_features, other=0.0, eviction_policy="evict_first"
    )
    if norm_weight is not None:
        norms = tl.load(norm_weight + column, mask=column < in_features, other=0.0)
    wait_for_inputs(PDL)

    row = tl.arange(0, ROWS)
    x_at = x + row.to(tl.int64)[:, None, None] * x_stride + column
    is_row = row[:, None, None] < num_rows
    added = residual
    if residual is not None:
        added = load_residual(residual, row, feature, num_rows, out_features, residual_stride)
    xs = tl.load(x_at, mask=is_row & (column < in_features), other=0.0)
    if norm_weight is not None:
        squares = squared(xs)
        for tile in tl.static_range(1, TILES):
            rest = is_row & (column < in_features - tile * BK)
            squares += squared(load_of_two(x_at + tile * BK, rest))
        scale = tl.rsqrt(tl.sum(squares, axis=2, keep_dims=True) / in_features + eps)
    sums = tl.zeros([ROWS, BN, BK // PACK], tl.float32)
    for tile in tl.static_range(TILES):
        left = in_features - tile * BK
        if tile > 0:
            xs = tl.load(x_at + tile * BK, mask=is_row & (column < left), other=0.0)
        if tile + 1 < TILES:
            next_at, next_columns = (tile + 1) * BK, column < left - BK
            next_weights = tl.load(
                weight_at + next_at, mask=next_columns, other=0.0, eviction_policy="evict_first"
            )
            if norm_weight is not None:
                next_norms = tl.load(norm_weight + next_at + column, mask=next_columns, other=0.0)
        # Always so. Without a branch the compiler moves loads between the products, to save
        # registers, and each of them waits for its own.
        if left > 0:
            if norm_weight is not None:
                sums += products_of_packs(scaled(xs, norms, scale), weights, PACK)
            else:
                sums += products_of_packs(xs, weights, PACK)
        if tile + 1 < TILES:
            weights = next_weights
            if norm_weight is not None:
                norms = next_norms
    store_sums(tl.sum(sums, axis=2), bias, added, out, row, num_rows, out_features, SILU)


@triton.jit
def products_of_packs(xs, weights, PACK: tl.constexpr):
    """xs [ROWS, 1, BK] times weights [1, BN, BK], summed by packs: [ROWS, BN, BK / PACK] fp32."""
    products = xs.to(tl.float32) * weights.to(tl.float32)
    num_packs: tl.constexpr = products.shape[2] // PACK
    packs = tl.reshape(products, [products.shape[0], products.shape[1], num_packs, PACK])
    return tl.sum(packs, axis=3)


@triton.jit(do_not_specialize=["num_rows"])
def linear_dot_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    in_features,
    out_features,
    x_stride,
    weight_stride,
    TILES: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = x @ weight^T + bias by tensor cores; a program takes BN output features.

    The tensors are those of `linear_plain_kernel`, of 16-bit numbers; num_rows is at most 8, BN a
    multiple of 8. Sums are fp32, PARTS of them apart from each other, a multiple of the warps.

    No number moves between threads before the sums do. Columns are cut into pieces of 32, 64
    bytes, of which 4 lanes of a warp load 16 each; the 8 lanes beside them have other rows. In the
    product of one piece such a lane owns columns 2t, 2t + 1, 2t + 8, 2t + 9 of each 16, not the 8
    that it has loaded. But a sum does not mind the order of its terms: `add_dot` renames columns,
    of x and of weight alike, so that they are the same.
    """
    let_next_start(PDL)
    PIECES: tl.constexpr = BK // 32
    # Which weight row of 8, which piece of it, and which 8 weight rows: in this order lanes take
    # the rows, warps the pieces, and registers the rest.
    tile_row = tl.arange(0, PIECES * BN)
    column = (tile_row // 8 % PIECES * 32)[:, None] + tl.arange(0, 32)[None, :]
    first = tl.program_id(0) * BN
    tile_feature = first + tile_row // (8 * PIECES) * 8 + tile_row % 8
    weight_row = row_of_weight(tile_feature, out_features, False)
    weight_at = weight + weight_row.to(tl.int64)[:, None] * weight_stride + column
    weights = tl.load(
        weight_at, mask=column < in_features, other=0.0, eviction_policy="evict_first"
    )
    wait_for_inputs(PDL)

    x_tile_row = tl.arange(0, PIECES * 8)
    x_column = (x_tile_row // 8 * 32)[:, None] + tl.arange(0, 32)[None, :]
    tile_x = x_tile_row % 8
    x_at = x + tile_x.to(tl.int64)[:, None] * x_stride + x_column
    is_row = tile_x[:, None] < num_rows
    sums = tl.zeros([PARTS, 8, BN], tl.float32)
    for tile in tl.static_range(TILES):
        left = in_features - tile * BK
        xs = tl.load(x_at + tile * BK, mask=is_row & (x_column < left), other=0.0)
        if tile + 1 < TILES:
            next_weights = tl.load(
                weight_at + (tile + 1) * BK,
                mask=column < left - BK,
                other=0.0,
                eviction_policy="evict_first",
            )
        if left > 0:  # always, as above
            sums = add_dot(sums, xs, weights)
        if tile + 1 < TILES:
            weights = next_weights
    row = tl.arange(0, 8)
    store_sums(tl.sum(sums, axis=0), bias, None, out, row, num_rows, out_features, False)


@triton.jit
def add_dot(sums, xs, weights):
    """Add xs [PIECES * 8, 32] times weights [PIECES * BN, 32] to sums [PARTS, 8, BN]."""
    PARTS: tl.constexpr = sums.shape[0]
    BN: tl.constexpr = sums.shape[2]
    EACH: tl.constexpr = xs.shape[0] // (8 * PARTS)  # pieces of a part
    # Pieces go to parts in turn. A piece is [4 lanes, 2 dots, 2 halves of a dot, 2 numbers].
    xs = tl.reshape(xs, [EACH, PARTS, 8, 4, 2, 2, 2])
    xs = tl.permute(xs, (1, 2, 0, 4, 5, 3, 6))
    weights = tl.reshape(weights, [BN // 8, EACH, PARTS, 8, 4, 2, 2, 2])
    weights = tl.permute(weights, (2, 1, 5, 6, 4, 7, 0, 3))
    return tl.dot(
        tl.reshape(xs, [PARTS, 8, EACH * 32]), tl.reshape(weights, [PARTS, EACH * 32, BN]), sums
    )


@triton.jit
def row_of_weight(feature, out_features, SILU: tl.constexpr):
    """Return the weight row of each feature of the product; past the last the last again.

    With SILU rows of gate, the first half of a weight, and of up, the other, take turns.
    """
    if SILU:
        half = out_features // 2
        return tl.minimum(feature // 2, half - 1) + feature % 2 * half
    else:
        return tl.minimum(feature, out_features - 1)


@triton.jit
def load_of_two(at, mask):
    """Load what will be loaded once more, from the L1 cache: to keep it takes too many registers.

    The two loads are said in other words, or the compiler would take them for one.
    """
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def squared(xs):
    """Return the squares of xs in fp32."""
    wide = xs.to(tl.float32)
    return wide * wide


@triton.jit
def load_residual(residual, row, feature, num_rows, out_features, stride):
    """Return what is added to the product, [rows, features].

    It is loaded together with x, so that nothing waits for it at the end. The residual may be what
    the program stores to: no other one reads or writes these elements.
    """
    is_real = (row < num_rows)[:, None] & (feature < out_features)[None, :]
    at = residual + row.to(tl.int64)[:, None] * stride + feature[None, :]
    return tl.load(at, mask=is_real, other=0.0)


@triton.jit
def store_sums(sums, bias, added, out, row, num_rows, out_features, SILU: tl.constexpr):
    """Add the bias to the program's sums [rows, BN] and round them, once, to the dtype of out.

    The rounded sums go on to SILU, or have `added`, if it is not None, added: rounded again.
    """
    BN: tl.constexpr = sums.shape[1]
    feature = tl.program_id(0) * BN + tl.arange(0, BN)
    if bias is not None:
        bias_at = bias + row_of_weight(feature, out_features, SILU)
        sums += tl.load(bias_at, mask=feature < out_features, other=0.0).to(tl.float32)[None, :]
    rounded = sums.to(out.dtype.element_ty)
    column, width = feature, out_features
    if added is not None:
        rounded = (rounded.to(tl.float32) + added.to(tl.float32)).to(added.dtype)
    if SILU:
        pairs = tl.reshape(rounded.to(tl.float32), [sums.shape[0], BN // 2, 2])
        gate, up = tl.split(pairs)
        product = silu_times(gate, up, out.dtype.element_ty == tl.float32)
        rounded = product.to(out.dtype.element_ty)
        column = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        width = out_features // 2
    at = out + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(at, rounded, mask=(row < num_rows)[:, None] & (column < width)[None, :])
