"""SwiGLU's activation: `silu(gate) * up`."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

from tvr.backends.triton.device import let_next_start, wait_for_inputs
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.contract import BoundOp, SiluMulSpec

_BLOCK = 1024


@triton.jit
def silu_mul_kernel(x, out, x_stride, out_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A program takes BLOCK columns of a row of x [T, 2 * width], which out [T, width] gets."""
    row = tl.cast(tl.program_id(0), tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    wait_for_inputs(PDL)
    let_next_start(PDL)
    gate = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + width + column, mask=inside, other=0.0).to(tl.float32)
    # exp(-gate) may be infinite; the quotient is then 0, as it should be.
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out + row * out_stride + column, (silu * up).to(out.dtype.element_ty), mask=inside)


def bind_silu_mul(spec: SiluMulSpec, gpu: Gpu) -> BoundOp:
    width = spec.intermediate_size
    kernel = Kernel(gpu, silu_mul_kernel, Config(num_warps=4), BLOCK=_BLOCK)

    def run(x: Tensor, *, out: Tensor) -> Tensor:
        """x [T, 2 * I], gate columns then up columns; out [T, I]; computed in fp32."""
        grid = (len(x), -(-width // _BLOCK))
        kernel(grid, x, out, x.stride(0), out.stride(0), width)
        return out

    return BoundOp(run=run)
