"""RMSNorm, alone and after a residual add: `y = x / sqrt(mean(x^2) + eps) * weight`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.contract import AddRmsNormSpec, BoundOp, RmsNormSpec

if TYPE_CHECKING:
    from torch import Tensor


def bind_rms_norm(spec: RmsNormSpec) -> BoundOp:
    mean = _ordered_mean if spec.batch_invariant else _mean

    def run(x: Tensor, weight: Tensor, *, eps: float, out: Tensor) -> Tensor:
        """Normalise in fp32, round to x's dtype, multiply by the weight and round again."""
        x32 = x.float()
        normed = x32 * torch.rsqrt(mean(x32 * x32) + eps)
        return torch.mul(normed.to(x.dtype), weight, out=out)

    return BoundOp(run=run)


def bind_add_rms_norm(spec: AddRmsNormSpec) -> BoundOp:
    rms_norm = bind_rms_norm(spec).run

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
        torch.add(x, residual, out=residual_out)
        return rms_norm(residual_out, weight, eps=eps, out=out), residual_out

    return BoundOp(run=run)


def _mean(x: Tensor) -> Tensor:
    return x.mean(dim=-1, keepdim=True)


def _ordered_mean(x: Tensor) -> Tensor:
    """Mean over the last dim, summed by folding halves.

    On a GPU `Tensor.mean` splits a row among threads in a way that depends on the number of
    rows. Elementwise adds have no such freedom, so this order is the same in every batch.
    """
    total = x
    while (width := total.shape[-1]) > 1:
        half = width // 2
        folded = total[..., :half] + total[..., half : 2 * half]
        if width % 2:
            folded[..., :1] += total[..., -1:]
        total = folded
    return total / x.shape[-1]
