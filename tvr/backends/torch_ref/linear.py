"""The matrix product of a layer's weight."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from tvr.contract import BoundOp, LinearSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_TILE_ROWS = {"cpu": 16, "cuda": 128}
_TILE_FEATURES = 16


def bind_linear(spec: LinearSpec) -> BoundOp:
    if spec.batch_invariant:
        return BoundOp(run=_run_tiled, pack=_pack_padded)
    return BoundOp(run=_run)


def _run(x: Tensor, packed: tuple[Tensor, Tensor | None], *, out: Tensor) -> Tensor:
    """out = x @ weight.T (+ bias); x [T, in], weight [out, in], bias [out]; out may be wider."""
    weight, bias = packed
    if x.is_cuda and x.dtype != torch.float32:
        if bias is None and out.dtype == x.dtype:
            with _sums_in_fp32():
                return torch.mm(x, weight.t(), out=out)
        # A bias would be added to a rounded product.
        product = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out.copy_(product if bias is None else product.add_(bias))
    if out.dtype != x.dtype:
        x, weight = x.to(out.dtype), weight.to(out.dtype)
        bias = None if bias is None else bias.to(out.dtype)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


_HALF_SUMS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


@contextmanager
def _sums_in_fp32() -> Iterator[None]:
    """Keep cuBLAS from adding partial products in half precision, as torch lets it."""
    matmul = torch.backends.cuda.matmul
    before = {}
    for name in _HALF_SUMS:
        # Newer torch keeps a pair, of which the name alone gives the first.
        splits = getattr(matmul, f"{name}_split_k", None)
        before[name] = getattr(matmul, name) if splits is None else (getattr(matmul, name), splits)
        setattr(matmul, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def _pack_padded(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Pad both feature counts to multiples of 16 with zeros; most models need no padding.

    BLAS libraries have special code for narrow matrices in which a row's result depends on where
    in the tile it stands.
    """
    more_out, more_in = (-size % _TILE_FEATURES for size in weight.shape)
    if more_out or more_in:
        weight = pad(weight, (0, more_in, 0, more_out))
        bias = None if bias is None else pad(bias, (0, more_out))
    return weight.contiguous(), bias


def _run_tiled(x: Tensor, packed: tuple[Tensor, Tensor | None], *, out: Tensor) -> Tensor:
    """`_run` in products of one fixed shape, so that a row's bits do not depend on the others.

    How a GEMM splits its sums depends on the number of rows. Every tile here has as many, the
    last one filled up with zeros.
    """
    weight = packed[0]
    in_features, out_features = x.shape[1], out.shape[1]
    tile_rows = _TILE_ROWS[x.device.type]
    tile = x.new_zeros(tile_rows, weight.shape[1])
    product = out.new_empty(tile_rows, weight.shape[0])
    for start in range(0, x.shape[0], tile_rows):
        rows = x[start : start + tile_rows]
        n = rows.shape[0]
        tile[:n, :in_features] = rows
        tile[n:] = 0
        _run(tile, packed, out=product)
        out[start : start + n] = product[:n, :out_features]
    return out
