"""The matrix product for up to 8 rows: the weight is read once, as it lies in the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.backends.pycuda_raw import gemv
from tvr.backends.pycuda_raw.launch import (
    Gpu,
    Kernel,
    Param,
    int32,
    int64,
    refuse_more_rows,
    tensor,
)
from tvr.backends.pycuda_raw.threads import PACK_SIZES
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import DTYPES, BoundOp, LinearSpec

if TYPE_CHECKING:
    from torch import Tensor

_MOST_ROWS, _TILE_FEATURES = 8, 8  # of a block, as in the source
_PACKS_OF_CHUNK = 32  # of 16 bytes, of a weight row: what a warp takes at a time
#: Shared memory of a warp: a chunk of each row of x, and the sums.
_WARP_BYTES = _MOST_ROWS * (576 + 4 * _TILE_FEATURES)
_LEAST_WARPS, _MOST_WARPS = 2, 16
_WARP = 32
_PACK_BYTES = 16


def linear_params(spec: LinearSpec) -> tuple[Param, ...]:
    """Return the parameters of `linear.cu`: a bias that `spec` asks for may not be left out."""
    return (
        *(tensor(name, spec.dtype) for name in ("x", "weight")),
        tensor("bias", spec.dtype, optional=not spec.bias),
        tensor("out", spec.out_dtype or spec.dtype, inner=2),
        *map(int32, ("num_rows", "in_features", "out_features")),
        *map(int64, ("x_stride", "weight_stride")),
        *map(int32, ("packed", "out_dtype")),
    )


def bind_linear(spec: LinearSpec, gpu: Gpu) -> BoundOp:
    per_pack = PACK_SIZES[spec.dtype]
    # From the width alone: how many warps share it decides the order of the sums, and a row's bits
    # may not depend on the other rows.
    num_chunks = -(-spec.in_features // (_PACKS_OF_CHUNK * per_pack))
    num_warps = min(max(num_chunks, _LEAST_WARPS), _MOST_WARPS)
    num_blocks = -(-spec.out_features // _TILE_FEATURES)
    kernel = Kernel(
        gpu,
        KernelVariant(source="linear", dtype=spec.dtype),
        linear_params(spec),
        block=_WARP * num_warps,
        shared_bytes=_WARP_BYTES * num_warps,
    )
    out_code = DTYPES.index(
        spec.out_dtype or spec.dtype
    )  # 0 fp32, 1 fp16, 2 bf16, as in the source
    # Another order of sums, which a row that has company would not get.
    one_row = None if spec.batch_invariant else gemv.launcher(spec, gpu)

    def run(x: Tensor, packed: tuple[Tensor, Tensor | None], *, out: Tensor) -> Tensor:
        """out = x @ weight.T (+ bias); x [T, in] with T at most 8, out [T, out]."""
        refuse_more_rows(spec.op, x, _MOST_ROWS)
        if len(x) == 1 and one_row is not None:
            one_row(x, packed, out)
            return out
        weight, bias = packed
        whole_packs = (
            all(size % per_pack == 0 for size in (spec.in_features, x.stride(0), weight.stride(0)))
            and not (x.data_ptr() | weight.data_ptr()) % _PACK_BYTES
        )
        kernel(
            (num_blocks if len(x) else 0,),
            x,
            weight,
            bias,
            out,
            len(x),
            spec.in_features,
            spec.out_features,
            x.stride(0),
            weight.stride(0),
            whole_packs,
            out_code,
        )
        return out

    return BoundOp(run=run)
