"""`add_rms_norm`: residual_out = x + residual, and out = `rms_norm` of that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.contract import AddRmsNormSpec, BoundOp, Box

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


def bind(spec: AddRmsNormSpec) -> BoundOp:
    """Return the op for rows of `spec.hidden_size`; a kernel would be compiled here."""
    return BoundOp(run=run)


def run(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float,
    out: Tensor,
    residual_out: Tensor,
) -> tuple[Tensor, Tensor]:
    """x, residual, out, residual_out [..., hidden]; weight [hidden].

    residual_out may be residual itself, which is read before it is written.
    """
    total = x + residual  # rounded to the activation dtype: the norm reads what is stored
    residual_out.copy_(total)
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    out.copy_(normed.to(x.dtype) * weight)  # rounded before and after the weight: "twice"
    return out, residual_out
