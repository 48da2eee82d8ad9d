"""`rms_norm`: out = x / sqrt(mean(x^2) + eps) * weight, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.contract import BoundOp, Box, RmsNormSpec

if TYPE_CHECKING:
    from torch import Tensor

BOXES = [
    Box(
        dtypes=("float32", "float16", "bfloat16"),
        devices=("cpu", "cuda"),
        flags=frozenset({"cuda_graph", "deterministic"}),
        norm_rounding="twice",
    )
]


def bind(spec: RmsNormSpec) -> BoundOp:
    """Return the op for rows of `spec.hidden_size`; a kernel would be compiled here."""
    return BoundOp(run=run)


def run(x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> Tensor:
    """x, out [..., hidden]; weight [hidden]."""
    wide = x.float()  # squares of half-precision numbers overflow half precision
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    # "twice": round the normalised row to x's dtype, then its product with the weight.
    return out.copy_(normed.to(x.dtype) * weight)
