"""The matrix product of a single row, alone and with what stands before or behind it in a layer.

A step of one row is bound by the bytes of the weights, and loses a microsecond or more between two
kernels: a norm, SiLU or the residual's add costs next to nothing inside of a product.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.backends.pycuda_raw.launch import (
    Gpu,
    Kernel,
    Param,
    float32,
    int32,
    int64,
    refuse_more_rows,
    tensor,
)
from tvr.backends.pycuda_raw.threads import num_packs
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import DTYPES, BoundOp, FusedLinearSpec, LinearSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

_THREADS, _ROWS = 256, 4  # of a block; its rows are the weight's


def gemv_params(spec: LinearSpec) -> tuple[Param, ...]:
    """Return the parameters of `gemv.cu`: of what `spec` asks for nothing may be left out."""
    asked = {"bias": spec.bias, "norm_weight": False, "residual": False}
    if isinstance(spec, FusedLinearSpec):
        asked |= {"norm_weight": spec.rms_norm, "residual": spec.add}
    return (
        *(tensor(name, spec.dtype) for name in ("x", "weight")),
        *(tensor(name, spec.dtype, optional=not wanted) for name, wanted in asked.items()),
        tensor("out", spec.out_dtype or spec.dtype, inner=2),
        int64("weight_stride"),
        *map(int32, ("in_features", "out_columns")),
        float32("eps"),
        int32("out_dtype"),
    )


def bind_fused_linear(spec: FusedLinearSpec, gpu: Gpu) -> BoundOp:
    launch = launcher(spec, gpu)
    rms_norm, add = spec.rms_norm, spec.add

    def run(
        x: Tensor,
        packed: tuple[Tensor, Tensor | None],
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> Tensor:
        """x [T, in] with T at most 1; out [T, out], half of that with silu_mul; it may be residual.

        What the spec does not ask for is left out, given or not.
        """
        refuse_more_rows(spec.op, x, 1)
        launch(x, packed, out, norm_weight if rms_norm else None, residual if add else None, eps)
        return out

    return BoundOp(run=run)


def launcher(spec: LinearSpec, gpu: Gpu) -> Callable[..., None]:
    """Return what launches the kernel for `spec`, that of a `linear` too.

    It is called as launch(x, (weight, bias), out, norm_weight, residual, eps), the last three left
    out where there is nothing of the kind; x has one row, or none.
    """
    norm, silu, out_columns = False, False, spec.out_features
    if isinstance(spec, FusedLinearSpec):
        norm, silu, out_columns = spec.rms_norm, spec.silu_mul, spec.out_columns
    num_blocks = -(-out_columns // (_ROWS // 2 if silu else _ROWS))
    packs = num_packs(spec.in_features, spec.dtype)
    constants = {
        "PACKS": 1 if packs <= _THREADS else 2,  # of a thread at a time
        "TILED": packs > 2 * _THREADS,
        "NORM": norm,
        "SILU": silu,
    }
    kernel = Kernel(
        gpu,
        KernelVariant(
            source="gemv",
            dtype=spec.dtype,
            defines=tuple((name, int(value)) for name, value in constants.items()),
        ),
        gemv_params(spec),
        block=_THREADS,
    )
    out_code = DTYPES.index(
        spec.out_dtype or spec.dtype
    )  # 0 fp32, 1 fp16, 2 bf16, as in the source

    def launch(
        x: Tensor,
        packed: tuple[Tensor, Tensor | None],
        out: Tensor,
        norm_weight: Tensor | None = None,
        residual: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        weight, bias = packed
        kernel(
            (num_blocks if len(x) else 0,),
            *(x, weight, bias, norm_weight, residual, out),
            *(weight.stride(0), spec.in_features, out_columns, eps, out_code),
        )

    return launch
