"""The matrix product for up to 8 rows: the weight is read once, as it lies in the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import triton
from torch import Tensor

from tvr.backends.triton.configs import tuned
from tvr.backends.triton.launch import Config, Gpu, Kernel
from tvr.backends.triton.linear_kernels import linear_dot_kernel, linear_plain_kernel
from tvr.contract import BoundOp, FusedLinearSpec, LinearSpec
from tvr.errors import KernelError

_MOST_ROWS = 8

#: Elements of 16 bytes.
_PACK = {"float32": 4, "float16": 8, "bfloat16": 8}


def bind_linear(spec: LinearSpec, gpu: Gpu) -> BoundOp:
    launch = launcher(spec, gpu)

    def run(x: Tensor, packed: tuple[Tensor, Tensor | None], *, out: Tensor) -> Tensor:
        """out = x @ weight.T (+ bias); x [T, in] with T at most 8, out [T, out]."""
        launch(x, packed, out)
        return out

    return BoundOp(run=run)


def launcher(spec: LinearSpec, gpu: Gpu) -> Callable[..., None]:
    """Return what launches the kernel for `spec`, that of a `fused_linear` too.

    It is called as launch(x, (weight, bias), out, norm_weight, residual, eps), the last three left
    out where there is nothing of the kind, and raises a KernelError for more rows than there are
    kernels for: 8, or 1 of a `fused_linear`.
    """
    counts: tuple[int, ...] = (1, 2, 4, _MOST_ROWS)
    if isinstance(spec, FusedLinearSpec):
        counts = (1,)
    elif spec.batch_invariant:
        # A row's bits must not depend on the others: all counts of rows have one order of sums.
        counts = (_MOST_ROWS,)
    launches = {rows: _kernel(spec, gpu, rows) for rows in counts}
    most = counts[-1]
    of_rows = [launches[min(n for n in counts if n >= rows)] for rows in range(most + 1)]

    def launch(
        x: Tensor,
        packed: tuple[Tensor, Tensor | None],
        out: Tensor,
        norm_weight: Tensor | None = None,
        residual: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        num_rows = len(x)
        if num_rows > most:
            raise KernelError(
                f"{spec.op}: x has {num_rows} rows; this kernel takes at most {most}: "
                "bind another backend for more"
            )
        weight, bias = packed
        kernel, programs, is_plain = of_rows[num_rows]
        residual_stride = 0 if residual is None else residual.stride(0)
        kernel(
            (programs if num_rows else 0,),
            *(x, weight, bias, out),
            *(num_rows, spec.in_features, spec.out_features, x.stride(0), weight.stride(0)),
            *((norm_weight, eps, residual, residual_stride) if is_plain else ()),
        )

    return launch


def _kernel(spec: LinearSpec, gpu: Gpu, rows: int) -> tuple[Kernel, int, bool]:
    """Return the kernel for up to `rows` rows, its programs, and whether it is the plain one."""
    # One row costs plain multiply-adds less than the loads; tensor cores would round fp32 to TF32.
    is_plain = rows == 1 or spec.dtype == "float32"
    config = _config(spec, gpu, rows, is_plain)
    programs = -(-spec.out_features // config.blocks["BN"])
    tiles = -(-spec.in_features // config.blocks["BK"])
    if not is_plain:
        return Kernel(gpu, linear_dot_kernel, config, TILES=tiles).with_l1(), programs, False
    kernel = Kernel(
        gpu,
        linear_plain_kernel,
        config,
        ROWS=rows,
        PACK=_PACK[spec.dtype],
        TILES=tiles,
        SILU=isinstance(spec, FusedLinearSpec) and spec.silu_mul,
    ).with_l1()
    # Which of two products is rounded before their sum and which is not the compiler decides, for
    # each row of a tile by itself.
    return kernel.unfused() if spec.batch_invariant else kernel, programs, True


def _config(spec: LinearSpec, gpu: Gpu, rows: int, is_plain: bool) -> Config:
    """Return the tuned configuration; of a fused product, unless it has its own, the plain one's.

    All that is fused with a product costs little beside the weight.
    """
    # Eight loads of 16 bytes a thread are under way before anything waits: all that a program of
    # 256 threads needs of 8 rows of `columns`.
    num_warps, columns = 8, 256 * _PACK[spec.dtype]
    blocks = {"BN": 8, "BK": columns, "PARTS": 32}
    if is_plain:
        # Of wider rows fewer, down to 2.
        width = min(max(triton.next_power_of_2(spec.in_features), columns), 4 * columns)
        blocks = {"BN": 8 * columns // width, "BK": width}
    elif spec.in_features > columns:
        # The next tile is loaded meanwhile, which takes so many registers that 4 warps, not 8, let
        # two programs share a multiprocessor.
        num_warps, blocks = 4, {"BN": 8, "BK": columns // 2, "PARTS": 16}
    kind = "plain" if is_plain else "dot"
    shape: dict[str, int | str] = {
        "dtype": spec.dtype,
        "in_features": spec.in_features,
        "out_features": spec.out_features,
        "rows": rows,
    }
    config = tuned(f"linear_{kind}", gpu.sm, Config(num_warps, 1, blocks), **shape)
    if isinstance(spec, FusedLinearSpec):
        if spec.silu_mul:  # a program has whole pairs of gate and up
            pairs = {**config.blocks, "BN": max(2, config.blocks["BN"])}
            config = replace(config, blocks=pairs)
        parts = "+".join(name for name in ("rms_norm", "silu_mul", "add") if getattr(spec, name))
        config = tuned("fused_linear", gpu.sm, config, **shape, fused=parts)
    return config
