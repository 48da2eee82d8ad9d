"""What `fused_linear` may give: every result that right parts, rounded one by one, can end at.

Rounding keeps order. So from the two ends of what the arithmetic of a norm or of a sum may be off,
both rounded as the parts round, come the two ends of what may be found. In half precision they are
the same number, but where a rounding boundary lies within that error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tvr.conformance import oracle, tolerance
from tvr.conformance.tensors import torch_dtype
from tvr.contract import FusedLinearSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.conformance.subject import Call

#: Rows of a weight that are taken at a time: all of them in fp64 would fill a device.
_WEIGHT_ROWS = 4096


class Range(NamedTuple):
    """Ends of what is right, and what is without any error of arithmetic: [T, out columns] fp64."""

    low: Tensor
    high: Tensor
    wanted: Tensor


def fused_range(call: Call, rounding: str) -> Range:
    """Return what a call of `fused_linear` may give, where its tensors are.

    Args:
        rounding: where the backend declares that a norm rounds: "twice" or "once".
    """
    spec = call.spec
    assert isinstance(spec, FusedLinearSpec)
    dtype = torch_dtype(spec.dtype)
    product, error = _product(spec, call, rounding)
    rounded = torch_dtype(spec.out_dtype or spec.dtype)
    ends = [(product + sign * error).to(rounded).double() for sign in (-1, 1, 0)]
    if spec.add:
        residual = call["residual"].double()
        ends = [(end + residual).to(dtype).double() for end in ends]
    low, high, wanted = ends
    return _silu_mul(spec.dtype, low, high, wanted) if spec.silu_mul else Range(low, high, wanted)


def _product(spec: FusedLinearSpec, call: Call, rounding: str) -> tuple[Tensor, Tensor]:
    """Return the exact product [T, out] fp64 of x or its norm, and how far off it may be."""
    x, unsure = call["x"], torch.zeros_like(call["x"], dtype=torch.float64)
    if spec.rms_norm:
        errors = (-tolerance.NORM_ARITHMETIC, tolerance.NORM_ARITHMETIC, 0.0)
        weight, eps = call["norm_weight"], call["eps"]
        below, above, x = (
            oracle.rms_norm(x, weight, eps, rounding, relative_error=error) for error in errors
        )
        unsure = torch.maximum((below.double() - x.double()).abs(), (above.double() - x).abs())
    unsure = unsure + tolerance.FUSED_SLACK * x.double().abs()
    products, errors_of_rows = [], []
    for rows in call["weight"].split(_WEIGHT_ROWS):
        products.append(oracle.linear(x, rows, None))
        errors_of_rows.append(oracle.linear(unsure, rows.abs(), None))
    product, error = torch.cat(products, dim=1), torch.cat(errors_of_rows, dim=1)
    if call["bias"] is not None:
        bias = call["bias"].double()
        product, error = product + bias, error + tolerance.FUSED_SLACK * bias.abs()
    return product, error


def _silu_mul(dtype: str, low: Tensor, high: Tensor, wanted: Tensor) -> Range:
    """Return what `silu_mul` may give of gate and up columns between `low` and `high`."""
    ulps = tolerance.SILU_FP32_ULPS if dtype == "float32" else tolerance.SILU_ULPS
    gates, ups = zip(*(end.chunk(2, dim=1) for end in (low, high)), strict=True)
    corners = [
        oracle.silu_mul(torch.cat([gate, up], dim=1)).to(torch_dtype(dtype)).double()
        for gate in gates
        for up in ups
    ]
    exact = oracle.silu_mul(wanted)
    bottom = torch.stack([*corners, exact]).amin(dim=0)
    top = torch.stack([*corners, exact]).amax(dim=0)
    return Range(
        bottom - (ulps * tolerance.ulp(bottom, dtype)).clamp_min(tolerance.SILU_ZERO),
        top + (ulps * tolerance.ulp(top, dtype)).clamp_min(tolerance.SILU_ZERO),
        exact,
    )
