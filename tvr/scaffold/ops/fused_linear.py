"""`fused_linear`: `linear`, of a norm of x, or with SwiGLU's activation or an add behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tvr.contract import BoundOp, Box, FusedLinearSpec

if TYPE_CHECKING:
    from torch import Tensor

BOXES = [
    Box(
        dtypes=("float32", "float16", "bfloat16"),
        devices=("cpu", "cuda"),
        fields=frozenset({"bias", "rms_norm", "silu_mul", "add"}),
        flags=frozenset({"cuda_graph", "deterministic"}),
        norm_rounding="twice",
    )
]


def bind(spec: FusedLinearSpec) -> BoundOp:
    """Return the op for one weight shape and what is fused with it.

    A backend may declare fewer fields: core asks for `rms_norm`, for `add`, and for `rms_norm` with
    `silu_mul`. `BoundOp(pack=...)` could lay a gate's rows beside those of up.
    """

    def run(
        x: Tensor,
        packed: tuple[Tensor, Tensor | None],
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> Tensor:
        """x [T, in]; weight [out, in]; out [T, out], or half of that with `silu_mul`.

        Each part is rounded by itself. out may be residual, which is read before it is written.
        """
        if norm_weight is not None:
            wide = x.float()
            normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
            x = normed.to(x.dtype) * norm_weight
        product = functional.linear(x, *packed)
        if spec.silu_mul:
            gate, up = product.float().chunk(2, dim=-1)
            return out.copy_(functional.silu(gate) * up)
        return out.copy_(product if residual is None else residual + product)

    return BoundOp(run=run)
