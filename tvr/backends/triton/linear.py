"""The matrix product for up to 8 rows: the weight is read once, as it lies in the checkpoint.

More rows are linear_split.py's.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.backends.triton.linear_split import bind_split_linear
from tvr.contract import BoundOp, LinearSpec
from tvr.errors import KernelError

_MOST_ROWS = 8

#: Elements of 16 bytes.
_PACK = {"float32": 4, "float16": 8, "bfloat16": 8}


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
    ROWS: tl.constexpr,
    PACK: tl.constexpr,
    TILES: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = x @ weight^T + bias by multiply-adds in fp32; a program takes BN output features.

    x [num_rows, in_features], weight [out_features, in_features], bias [out_features] or None,
    out [num_rows, out_features]; num_rows is at most ROWS, TILES * BK at least in_features.

    A thread keeps to the columns of its loads of PACK numbers, and sums them for each weight row
    and each row of x by itself: only what is left at the end goes from thread to thread.
    """
    let_next_start(PDL)
    column = tl.arange(0, BK)[None, None, :]
    feature = tl.program_id(0) * BN + tl.arange(0, BN)
    # Past the last weight row that row again, whose sums nobody stores.
    weight_row = tl.minimum(feature, out_features - 1)
    weight_at = weight + weight_row.to(tl.int64)[None, :, None] * weight_stride + column
    # Weights are no kernel's results, and take longest: on their way before the wait.
    weights = tl.load(
        weight_at, mask=column < in_features, other=0.0, eviction_policy="evict_first"
    )
    wait_for_inputs(PDL)

    row = tl.arange(0, ROWS)
    x_at = x + row.to(tl.int64)[:, None, None] * x_stride + column
    is_row = row[:, None, None] < num_rows
    sums = tl.zeros([ROWS, BN, BK // PACK], tl.float32)
    for tile in tl.static_range(TILES):
        left = in_features - tile * BK
        xs = tl.load(x_at + tile * BK, mask=is_row & (column < left), other=0.0)
        if tile + 1 < TILES:
            next_weights = tl.load(
                weight_at + (tile + 1) * BK,
                mask=column < left - BK,
                other=0.0,
                eviction_policy="evict_first",
            )
        # Always so. Without a branch the compiler moves loads between the products, to save
        # registers, and each of them waits for its own.
        if left > 0:
            sums += products_of_packs(xs, weights, PACK)
        if tile + 1 < TILES:
            weights = next_weights
    store_sums(tl.sum(sums, axis=2), bias, out, row, feature, num_rows, out_features)


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
    that it has loaded. But a sum does not mind the order of its terms: `add_dot`
    renames columns, of x and of weight alike, so that they are the same.
    """
    let_next_start(PDL)
    PIECES: tl.constexpr = BK // 32
    # Which weight row of 8, which piece of it, and which 8 weight rows: in this order lanes take
    # the rows, warps the pieces, and registers the rest.
    tile_row = tl.arange(0, PIECES * BN)
    column = (tile_row // 8 % PIECES * 32)[:, None] + tl.arange(0, 32)[None, :]
    first = tl.program_id(0) * BN
    weight_row = first + tile_row // (8 * PIECES) * 8 + tile_row % 8
    weight_row = tl.minimum(weight_row, out_features - 1)
    weight_at = weight + weight_row.to(tl.int64)[:, None] * weight_stride + column
    weights = tl.load(
        weight_at, mask=column < in_features, other=0.0, eviction_policy="evict_first"
    )
    wait_for_inputs(PDL)

    x_tile_row = tl.arange(0, PIECES * 8)
    x_column = (x_tile_row // 8 * 32)[:, None] + tl.arange(0, 32)[None, :]
    row = x_tile_row % 8
    x_at = x + row.to(tl.int64)[:, None] * x_stride + x_column
    is_row = row[:, None] < num_rows
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
    feature = first + tl.arange(0, BN)
    store_sums(tl.sum(sums, axis=0), bias, out, tl.arange(0, 8), feature, num_rows, out_features)


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
def store_sums(sums, bias, out, row, feature, num_rows, out_features):
    """Add the bias to sums [rows, features] and round them, once, to the dtype of out."""
    inside = feature < out_features
    if bias is not None:
        sums += tl.load(bias + feature, mask=inside, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * out_features + feature[None, :]
    is_real = (row < num_rows)[:, None] & inside[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_real)


def bind_linear(spec: LinearSpec, gpu: Gpu) -> BoundOp:
    if spec.max_rows is None or spec.max_rows > _MOST_ROWS:
        return bind_split_linear(spec, gpu)
    # A row's bits must not depend on the others: then all counts of rows have one order of sums.
    most = (_MOST_ROWS,) if spec.batch_invariant else (1, 2, 4, _MOST_ROWS)
    launches = {rows: _launch(spec, gpu, rows) for rows in most}
    of_rows = [launches[min(n for n in most if n >= rows)] for rows in range(_MOST_ROWS + 1)]

    def run(x: Tensor, packed: tuple[Tensor, Tensor | None], *, out: Tensor) -> Tensor:
        """out = x @ weight.T (+ bias); x [T, in] with T at most 8, out [T, out]."""
        num_rows = len(x)
        if num_rows > _MOST_ROWS:
            raise KernelError(
                f"linear: x has {num_rows} rows; this kernel takes at most {_MOST_ROWS}: "
                "bind another backend for more"
            )
        weight, bias = packed
        kernel, programs = of_rows[num_rows]
        kernel(
            (programs if num_rows else 0,),
            x,
            weight,
            bias,
            out,
            num_rows,
            spec.in_features,
            spec.out_features,
            x.stride(0),
            weight.stride(0),
        )
        return out

    return BoundOp(run=run)


def _launch(spec: LinearSpec, gpu: Gpu, rows: int) -> tuple[Kernel, int]:
    """Return the kernel for up to `rows` rows, and how many programs it takes."""
    pack = _PACK[spec.dtype]
    # One row costs plain multiply-adds less than the loads; tensor cores would round fp32 to TF32.
    is_plain = rows == 1 or spec.dtype == "float32"
    # Eight loads of 16 bytes a thread are under way before anything waits: all that a program of
    # 256 threads needs of 8 rows of `columns`.
    num_warps, columns = 8, 256 * pack
    blocks = {"BN": 8, "BK": columns, "PARTS": 32}
    if is_plain:
        # Of wider rows fewer, down to 2.
        width = min(max(triton.next_power_of_2(spec.in_features), columns), 4 * columns)
        blocks = {"BN": 8 * columns // width, "BK": width}
    elif spec.in_features > columns:
        # The next tile is loaded meanwhile, which takes so many registers that 4 warps, not 8, let
        # two programs share a multiprocessor.
        num_warps, blocks = 4, {"BN": 8, "BK": columns // 2, "PARTS": 16}
    config = tuned(
        "linear_plain" if is_plain else "linear_dot",
        gpu.sm,
        Config(num_warps, 1, blocks),
        dtype=spec.dtype,
        in_features=spec.in_features,
        out_features=spec.out_features,
        rows=rows,
    )
    tiles = -(-spec.in_features // config.blocks["BK"])
    if is_plain:
        kernel = Kernel(gpu, linear_plain_kernel, config, ROWS=rows, PACK=pack, TILES=tiles)
    else:
        kernel = Kernel(gpu, linear_dot_kernel, config, TILES=tiles)
    return kernel, -(-spec.out_features // config.blocks["BN"])
