"""`linear` with a norm before it, and SwiGLU's activation or a residual's add behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tvr.backends.torch_ref.activation import bind_silu_mul
from tvr.backends.torch_ref.linear import bind_linear
from tvr.backends.torch_ref.norm import bind_rms_norm
from tvr.contract import BoundOp, FusedLinearSpec, LinearSpec, RmsNormSpec, SiluMulSpec

if TYPE_CHECKING:
    from torch import Tensor


def bind_fused_linear(spec: FusedLinearSpec) -> BoundOp:
    bound = {part.op: part for part in spec.parts()}
    product, norm, activation = (bound.get(op) for op in ("linear", "rms_norm", "silu_mul"))
    assert isinstance(product, LinearSpec)
    linear = bind_linear(product)
    rms_norm = bind_rms_norm(norm) if isinstance(norm, RmsNormSpec) else None
    silu_mul = bind_silu_mul(activation) if isinstance(activation, SiluMulSpec) else None

    def run(
        x: Tensor,
        packed: Any,  # noqa: ANN401
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> Tensor:
        """Each part rounds as it does by itself; x [T, in], residual [T, out]; out may be it."""
        if rms_norm is not None:
            x = rms_norm.run(x, norm_weight, eps=eps, out=torch.empty_like(x))
        if silu_mul is not None:
            gate_up = linear.run(x, packed, out=x.new_empty(len(x), spec.out_features))
            silu_mul.run(gate_up, out=out)
        elif spec.add:
            product = linear.run(x, packed, out=torch.empty_like(out))
            assert residual is not None, "the spec asks for it"
            torch.add(residual, product, out=out)
        else:
            linear.run(x, packed, out=out)
        return out

    return BoundOp(run=run, pack=linear.pack)
