"""The gated activation of the MLP: a thread for 16 bytes of the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.backends.pycuda_raw.launch import Gpu, Kernel, Param, int32, int64, tensor
from tvr.backends.pycuda_raw.threads import num_packs, shared_evenly
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import BoundOp, SiluMulSpec

if TYPE_CHECKING:
    from torch import Tensor

_MOST_THREADS = 256


def silu_mul_params(dtype: str) -> tuple[Param, ...]:
    """Return the parameters of `silu_mul.cu`."""
    return (
        *(tensor(name, dtype) for name in ("x", "out")),
        *map(int64, ("x_stride", "out_stride")),
        int32("width"),
    )


def bind_silu_mul(spec: SiluMulSpec, gpu: Gpu) -> BoundOp:
    width = spec.intermediate_size
    packs = num_packs(width, spec.dtype)
    threads = shared_evenly(packs, _MOST_THREADS)
    parts = -(-packs // threads)  # of a row, each a block's
    kernel = Kernel(
        gpu,
        KernelVariant(source="silu_mul", dtype=spec.dtype),
        silu_mul_params(spec.dtype),
        block=threads,
    )

    def run(x: Tensor, *, out: Tensor) -> Tensor:
        """out = silu(gate) * up, in fp32 and rounded once; x [T, 2I] is gate columns, then up."""
        kernel((len(x), parts), x, out, x.stride(0), out.stride(0), width)
        return out

    return BoundOp(run=run)
