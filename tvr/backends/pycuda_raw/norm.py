"""RMSNorm, alone and after a residual add: a block a row, which it reads once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.backends.pycuda_raw.launch import Gpu, Kernel, Param, float32, int32, int64, tensor
from tvr.backends.pycuda_raw.threads import num_packs, shared_evenly
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import AddRmsNormSpec, BoundOp, RmsNormSpec
from tvr.errors import KernelError

if TYPE_CHECKING:
    from torch import Tensor

_MOST_THREADS = 1024
_PACKS_OF_A_THREAD = 2  # that it keeps in registers: KEPT in norm.cuh


def rms_norm_params(dtype: str) -> tuple[Param, ...]:
    """Return the parameters of `rms_norm.cu`."""
    return (
        *(tensor(name, dtype) for name in ("x", "weight", "out")),
        *map(int64, ("x_stride", "out_stride")),
        int32("hidden"),
        float32("eps"),
    )


def add_rms_norm_params(dtype: str) -> tuple[Param, ...]:
    """Return the parameters of `add_rms_norm.cu`."""
    return (
        *(tensor(name, dtype) for name in ("x", "residual", "weight", "out", "residual_out")),
        *map(int64, ("x_stride", "residual_stride", "out_stride", "residual_out_stride")),
        int32("hidden"),
        float32("eps"),
    )


def bind_rms_norm(spec: RmsNormSpec, gpu: Gpu) -> BoundOp:
    hidden = spec.hidden_size
    kernel = Kernel(
        gpu,
        KernelVariant(source="rms_norm", dtype=spec.dtype),
        rms_norm_params(spec.dtype),
        block=_threads(spec),
    )

    def run(x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> Tensor:
        """Normalise in fp32, round to x's dtype, multiply by the weight and round again."""
        rows, to = _as_rows(x), _rows_to_fill("rms_norm: out", out)
        kernel((len(rows),), rows, weight, to, rows.stride(0), to.stride(0), hidden, eps)
        return out

    return BoundOp(run=run)


def bind_add_rms_norm(spec: AddRmsNormSpec, gpu: Gpu) -> BoundOp:
    hidden = spec.hidden_size
    kernel = Kernel(
        gpu,
        KernelVariant(source="add_rms_norm", dtype=spec.dtype),
        add_rms_norm_params(spec.dtype),
        block=_threads(spec),
    )

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
        rows, added = _as_rows(x), _as_rows(residual)
        to = _rows_to_fill("add_rms_norm: out", out)
        sums = _rows_to_fill("add_rms_norm: residual_out", residual_out)
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


def _threads(spec: RmsNormSpec) -> int:
    """Return the threads of a row. The order of its sum follows from them, so rows have no say."""
    packs = num_packs(spec.hidden_size, spec.dtype)
    return shared_evenly(-(-packs // _PACKS_OF_A_THREAD), _MOST_THREADS)


def _as_rows(x: Tensor) -> Tensor:
    """Return x [..., hidden] as [rows, hidden]: a copy if its rows have no common stride."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _rows_to_fill(name: str, x: Tensor) -> Tensor:
    """Return an output as [rows, hidden], the same memory: what is written to a copy is lost."""
    rows = _as_rows(x)
    if rows.data_ptr() != x.data_ptr():
        raise KernelError(
            f"{name} {tuple(x.shape)} has strides {x.stride()}; its rows must all be as far "
            "apart: give a contiguous one"
        )
    return rows
