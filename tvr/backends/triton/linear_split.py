"""The matrix product for 9 to 128 rows: tensor cores, the columns of few outputs shared out."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.device import fetch_rows, let_next_start, wait_for_inputs
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.contract import BoundOp, Bounds, LinearSpec
from tvr.errors import KernelError

MOST_ROWS = 128

#: Tiles of so many rows of x: a product of fewer rows takes as long.
_ROW_TILES = (16, 32, 64, 128)

_MIN_STEPS = 4  # tiles of columns of a split
_MOST_SPLITS = 16
_FETCHED_BYTES = 16  # what is fetched ahead starts at multiples of this


@triton.jit(do_not_specialize=["num_rows"])
def linear_split_kernel(
    x,
    weight,
    bias,
    out,
    partials,
    counters,
    num_rows,
    in_features,
    out_features,
    columns,
    x_stride,
    weight_stride,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    FETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = x @ weight^T + bias; program (i, s) takes BN features of `columns` columns from s on.

    x [num_rows, in_features], weight [out_features, in_features], bias [out_features] or None,
    out [num_rows, out_features], all of 16-bit numbers but out; num_rows is at most ROWS. Sums are
    fp32. With SPLITS above 1 they go to partials [tiles, SPLITS, ROWS, BN] fp32, and the program
    that comes last to a tile, by counters [tiles] int32, adds them up in the order of columns.

    Features are the rows of the product on the tensor cores: a weight tile fills their 64, few
    rows of x their other side.
    """
    let_next_start(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    feature = tile * BN + tl.arange(0, BN)
    # Past the last weight row that row again, whose sums nobody stores; of x likewise.
    weight_row = tl.minimum(feature, out_features - 1).to(tl.int64)
    begin = split * columns
    end = tl.minimum(begin + columns, in_features)
    weight_rows = weight + weight_row * weight_stride + begin
    if FETCH:
        fetch_rows(weight_rows, end - begin, PDL)
    wait_for_inputs(PDL)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, BK)
    x_rows = x + tl.minimum(row, num_rows - 1).to(tl.int64) * x_stride + begin
    sums = tl.zeros([BN, ROWS], tl.float32)
    for first in range(0, end - begin, BK):
        inside = first + column < end - begin
        weights = tl.load(
            weight_rows[:, None] + (first + column)[None, :], mask=inside[None, :], other=0.0
        )
        xs = tl.load(x_rows[:, None] + (first + column)[None, :], mask=inside[None, :], other=0.0)
        sums = tl.dot(weights, tl.trans(xs), sums)

    if SPLITS == 1:
        store_features(sums, bias, out, row, feature, num_rows, out_features)
    else:
        at = row[None, :] * BN + tl.arange(0, BN)[:, None]
        is_row = (row < num_rows)[None, :]
        partials += tl.cast(tile, tl.int64) * SPLITS * ROWS * BN
        tl.store(partials + split * ROWS * BN + at, sums, mask=is_row)
        # Whoever is the last to count sees all that was written before the others counted.
        tl.debug_barrier()  # by every thread of this program
        num_before = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if num_before == SPLITS - 1:
            tl.store(counters + tile, 0)  # for the next product
            sums = tl.load(partials + at, mask=is_row, other=0.0)
            for s in tl.static_range(1, SPLITS):
                sums += tl.load(partials + s * ROWS * BN + at, mask=is_row, other=0.0)
            store_features(sums, bias, out, row, feature, num_rows, out_features)


@triton.jit
def store_features(sums, bias, out, row, feature, num_rows, out_features):
    """Add the bias to sums [features, rows] and round them, once, to the dtype of out."""
    inside = feature < out_features
    if bias is not None:
        sums += tl.load(bias + feature, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = out + row.to(tl.int64)[None, :] * out_features + feature[:, None]
    is_real = inside[:, None] & (row < num_rows)[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=is_real)


def _default(rows: int) -> Config:
    """Return tiles that two, or one of many rows, of a multiprocessor's programs have room for."""
    if rows == MOST_ROWS:
        return Config(8, 4, {"BN": 128, "BK": 64, "PROGRAMS": 1})
    return Config(4, 4, {"BN": 64, "BK": 128 if rows <= 32 else 64, "PROGRAMS": 2})


@dataclass(frozen=True)
class Launch:
    """How a product of up to `rows` rows is shared out.

    Attributes:
        kernel: compiled for it.
        tiles: of features.
        splits: programs of a tile.
        columns: of a program.
        room: bytes of the sums that programs of a tile leave for each other.
    """

    kernel: Kernel
    tiles: int
    splits: int
    columns: int
    room: int

    @classmethod
    def of(cls, spec: LinearSpec, gpu: Gpu, rows: int) -> "Launch":
        """Return what was fastest on this GPU, or else so many splits that all of it has work."""
        config = tuned(
            "linear_split",
            gpu.sm,
            _default(rows),
            dtype=spec.dtype,
            in_features=spec.in_features,
            out_features=spec.out_features,
            rows=rows,
        )
        blocks = dict(config.blocks)
        programs = gpu.num_sms * blocks.pop("PROGRAMS")
        tiles = -(-spec.out_features // blocks["BN"])
        steps = -(-spec.in_features // blocks["BK"])
        # A split has some tiles to load while it waits for one, or it would wait for each.
        wanted = min(programs // tiles, steps // _MIN_STEPS, _MOST_SPLITS)
        columns = -(-steps // max(wanted, 1)) * blocks["BK"]
        splits = -(-spec.in_features // columns)
        kernel = Kernel(
            gpu,
            linear_split_kernel,
            replace(config, blocks=blocks),
            ROWS=rows,
            SPLITS=splits,
            FETCH=spec.in_features * 2 % _FETCHED_BYTES == 0,
        )
        room = tiles * splits * rows * blocks["BN"] * 4 if splits > 1 else 0
        return cls(kernel, tiles, splits, columns, room)


def bind_split_linear(spec: LinearSpec, gpu: Gpu) -> BoundOp:
    launches = {rows: Launch.of(spec, gpu, rows) for rows in _ROW_TILES}
    of_rows = [launches[min(n for n in _ROW_TILES if n >= rows)] for rows in range(MOST_ROWS + 1)]
    # What follows starts at a multiple of 16 bytes.
    counted = 16 * -(-max(launch.tiles for launch in launches.values()) // 4)
    room = max(launch.room for launch in launches.values())
    shared: dict[str, Tensor | None] = {"counters": None, "partials": None}

    def run(x: Tensor, packed: tuple[Tensor, Tensor | None], *, out: Tensor) -> Tensor:
        """out = x @ weight.T (+ bias); x [T, in] with T at most 128, out [T, out]."""
        num_rows = len(x)
        if num_rows > MOST_ROWS:
            raise KernelError(
                f"linear: x has {num_rows} rows; this kernel takes at most {MOST_ROWS}: "
                "bind another backend for more"
            )
        weight, bias = packed
        launch = of_rows[num_rows]
        launch.kernel(
            (launch.tiles if num_rows else 0, launch.splits),
            *(x, weight, bias, out, shared["partials"], shared["counters"]),
            *(num_rows, spec.in_features, spec.out_features, launch.columns),
            *(x.stride(0), weight.stride(0)),
        )
        return out

    def workspace_bytes(bounds: Bounds) -> int:
        """Return room for sums and counters; it does not depend on the step."""
        return counted + room

    def attach(workspace: Tensor) -> None:
        """Take the workspace. Counters are zero whenever no product runs."""
        shared["counters"] = workspace[:counted].view(torch.int32)
        shared["partials"] = workspace[counted : counted + room].view(torch.float32)

    if not room:
        return BoundOp(run=run)
    return BoundOp(run=run, workspace_bytes=workspace_bytes, attach=attach)
