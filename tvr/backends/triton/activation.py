"""SwiGLU's activation: `silu(gate) * up`."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.contract import BoundOp, SiluMulSpec

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2_HIGH = tl.constexpr(0.693359375)  # 9 bits: times a whole number up to 2^15 it is exact
_LN_2_LOW = tl.constexpr(-2.1219444005469057e-4)  # ln 2 is the sum of the two


@triton.jit
def exp_not_positive(x, EXACT: tl.constexpr):
    """Return exp(x) for fp32 x up to 0, to a few ulps if EXACT.

    A GPU has a fast power of two. Rounding x * log2(e) for it costs up to 2^-17 of the result:
    nothing in half precision, too much in fp32, where the whole powers of two are taken out first.
    """
    if EXACT:
        # Of larger numbers the powers are not exact, and 0 * inf is near. Below -104 it is 0.
        x = tl.maximum(x, -128.0)
        power = tl.floor(x * _LOG2_E)
        rest = (x - power * _LN_2_HIGH) - power * _LN_2_LOW
        return tl.exp2(power) * tl.exp2(rest * _LOG2_E)
    return tl.exp2(x * _LOG2_E)


@triton.jit
def silu_times(gate, up, EXACT: tl.constexpr):
    """Return silu(gate) * up of fp32 numbers, to a few ulps if EXACT.

    exp(-gate) could overflow. With e = exp(-|gate|), up to 1, silu is gate / (1 + e), and for a
    negative gate gate * e / (1 + e).
    """
    e = exp_not_positive(-tl.abs(gate), EXACT)
    return tl.where(gate < 0, gate * e, gate) / (1.0 + e) * up


@triton.jit
def silu_mul_kernel(x, out, x_stride, out_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A program takes BLOCK columns of a row of x [T, 2 * width], which out [T, width] gets.

    Computed in fp32, rounded once.
    """
    row = tl.cast(tl.program_id(0), tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    wait_for_inputs(PDL)
    let_next_start(PDL)
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    product = silu_times(gate, up, x.dtype.element_ty == tl.float32)
    tl.store(out + row * out_stride + column, product.to(out.dtype.element_ty), mask=inside)


def bind_silu_mul(spec: SiluMulSpec, gpu: Gpu) -> BoundOp:
    width = spec.intermediate_size
    # 16 bytes of gate and of up a thread in half precision, twice that in fp32.
    default = Config(num_warps=8, blocks={"BLOCK": 2048})
    config = tuned("silu_mul", gpu.sm, default, dtype=spec.dtype)
    kernel = Kernel(gpu, silu_mul_kernel, config)
    programs_of_a_row = triton.cdiv(width, config.blocks["BLOCK"])

    def run(x: Tensor, *, out: Tensor) -> Tensor:
        """x [T, 2 * I], gate columns then up columns; out [T, I]; computed in fp32."""
        kernel((len(x), programs_of_a_row), x, out, x.stride(0), out.stride(0), width)
        return out

    return BoundOp(run=run)
