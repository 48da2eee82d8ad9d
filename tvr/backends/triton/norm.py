"""RMSNorm, alone and after a residual add: a program a row, which it reads once."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.contract import AddRmsNormSpec, BoundOp, RmsNormSpec
from tvr.errors import KernelError

_MOST_KEPT = 8192  # columns of a row that stay in registers
_COLUMNS_OF_A_WARP = 512  # 16 a thread: two loads of 16 bytes in half precision


@triton.jit
def scaled(x, weight, scale):
    """Round where transformers does: the normalised row, then its product with the weight."""
    normed = (x.to(tl.float32) * scale).to(x.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(x.dtype)


@triton.jit
def rms_norm_kernel(
    x, weight, out, x_stride, out_stride, hidden, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """A program takes a row of x [rows, hidden]: out = x / sqrt(mean(x^2) + eps) * weight.

    It keeps BLOCK columns in registers; what is beyond is read again. Squares, their sum and the
    root are fp32.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    x += row * x_stride
    out += row * out_stride
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    # The weight is no kernel's result. It is loaded with the row and not where it is used: there
    # everything would wait for it.
    weights = tl.load(weight + column, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    kept = tl.load(x + column, mask=inside, other=0.0)
    squares = kept.to(tl.float32) * kept.to(tl.float32)
    for start in range(BLOCK, hidden, BLOCK):
        more = tl.load(x + start + column, mask=start + column < hidden, other=0.0).to(tl.float32)
        squares += more * more
    scale = tl.rsqrt(tl.sum(squares, axis=0) / hidden + eps)
    tl.store(out + column, scaled(kept, weights, scale), mask=inside)
    for start in range(BLOCK, hidden, BLOCK):
        rest = start + column
        more = tl.load(x + rest, mask=rest < hidden, other=0.0)
        weights = tl.load(weight + rest, mask=rest < hidden, other=0.0)
        tl.store(out + rest, scaled(more, weights, scale), mask=rest < hidden)


@triton.jit
def add_rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    residual_out,
    x_stride,
    residual_stride,
    out_stride,
    residual_out_stride,
    hidden,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program adds a row of x and of residual [rows, hidden], and norms what residual_out gets.

    The sum is rounded before the norm reads it. residual_out may be residual: a program reads
    whatever it adds before it writes there.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    x += row * x_stride
    residual += row * residual_stride
    out += row * out_stride
    residual_out += row * residual_out_stride
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    weights = tl.load(weight + column, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    added = tl.load(x + column, mask=inside, other=0.0)
    kept = tl.load(residual + column, mask=inside, other=0.0)
    kept = (added.to(tl.float32) + kept.to(tl.float32)).to(kept.dtype)
    tl.store(residual_out + column, kept, mask=inside)
    squares = kept.to(tl.float32) * kept.to(tl.float32)
    for start in range(BLOCK, hidden, BLOCK):
        rest = start + column
        added = tl.load(x + rest, mask=rest < hidden, other=0.0)
        more = tl.load(residual + rest, mask=rest < hidden, other=0.0)
        more = (added.to(tl.float32) + more.to(tl.float32)).to(more.dtype)
        tl.store(residual_out + rest, more, mask=rest < hidden)
        squares += more.to(tl.float32) * more.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / hidden + eps)
    tl.store(out + column, scaled(kept, weights, scale), mask=inside)
    if hidden > BLOCK:
        tl.debug_barrier()  # threads now read sums that others of this program have stored
    for start in range(BLOCK, hidden, BLOCK):
        rest = start + column
        more = tl.load(residual_out + rest, mask=rest < hidden, other=0.0)
        weights = tl.load(weight + rest, mask=rest < hidden, other=0.0)
        tl.store(out + rest, scaled(more, weights, scale), mask=rest < hidden)


def bind_rms_norm(spec: RmsNormSpec, gpu: Gpu) -> BoundOp:
    hidden = spec.hidden_size
    kernel = Kernel(gpu, rms_norm_kernel, _config(spec, gpu), BLOCK=_block(spec))

    def run(x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> Tensor:
        """Normalise in fp32, round to x's dtype, multiply by the weight and round again."""
        rows, to = _as_rows(x), _as_rows(out)
        kernel((len(rows),), rows, weight, to, rows.stride(0), to.stride(0), hidden, eps)
        return out

    return BoundOp(run=run)


def bind_add_rms_norm(spec: AddRmsNormSpec, gpu: Gpu) -> BoundOp:
    hidden = spec.hidden_size
    kernel = Kernel(gpu, add_rms_norm_kernel, _config(spec, gpu), BLOCK=_block(spec))

    def run(
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        *,
        eps: float,
        out: Tensor,
        residual_out: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Add, round to the activation dtype, then `rms_norm` of the rounded sum."""
        rows, added, to = _as_rows(x), _as_rows(residual), _as_rows(out)
        sums = _rows_to_fill(residual_out)
        kernel(
            (len(rows),),
            rows,
            added,
            weight,
            to,
            sums,
            rows.stride(0),
            added.stride(0),
            to.stride(0),
            sums.stride(0),
            hidden,
            eps,
        )
        return out, residual_out

    return BoundOp(run=run)


def _block(spec: RmsNormSpec) -> int:
    return int(min(triton.next_power_of_2(spec.hidden_size), _MOST_KEPT))


def _config(spec: RmsNormSpec, gpu: Gpu) -> Config:
    """Return the warps of a row. The order of its sum follows from them, so rows have no say."""
    default = Config(num_warps=max(1, _block(spec) // _COLUMNS_OF_A_WARP))
    return tuned(spec.op, gpu.sm, default, dtype=spec.dtype, block=_block(spec))


def _as_rows(x: Tensor) -> Tensor:
    """Return x [..., hidden] as [rows, hidden]: a copy if its rows have no common stride."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _rows_to_fill(residual_out: Tensor) -> Tensor:
    """Return the output that need not be contiguous as [rows, hidden], the same memory."""
    rows = _as_rows(residual_out)
    if rows.data_ptr() != residual_out.data_ptr():
        raise KernelError(
            f"add_rms_norm: residual_out {tuple(residual_out.shape)} has strides "
            f"{residual_out.stride()}; its rows must all be as far apart: give a contiguous one"
        )
    return rows
