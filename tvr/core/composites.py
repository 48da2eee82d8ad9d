"""Composite ops built from their parts, for when no backend should serve them whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tvr.contract import BoundOp, FusedLinearSpec, OpSpec


def compose(spec: OpSpec, bound: Sequence[BoundOp]) -> BoundOp:
    """Return the op of `spec` as calls of its parts, bound in the order of `spec.parts()`.

    They keep their own plans and workspaces.
    """
    parts = {part.op: op for part, op in zip(spec.parts(), bound, strict=True)}
    runs = {name: op.run for name, op in parts.items()}
    if isinstance(spec, FusedLinearSpec):
        return BoundOp(run=_fused_linear(spec, **runs), pack=parts["linear"].pack)
    return BoundOp(run=_COMPOSERS[spec.op](**runs))


def _add_rms_norm(*, rms_norm: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        *,
        eps: float,
        out: Tensor,
        residual_out: Tensor,
    ) -> tuple[Tensor, Tensor]:
        # The sum is rounded to the activation dtype here, before the norm reads it. Elementwise,
        # so `residual_out` may be `residual`.
        torch.add(x, residual, out=residual_out)
        rms_norm(residual_out, weight, eps=eps, out=out)
        return out, residual_out

    return run


def _rope_kv_write(*, rope: Callable[..., Any], kv_write: Callable[..., Any]) -> Callable[..., Any]:
    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        *,
        q_out: Tensor,
        k_out: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rope(q, k, positions, cos_sin_cache, q_out=q_out, k_out=k_out)
        kv_write(k_out, v, k_cache, v_cache, slot_mapping)
        return q_out, k_out

    return run


def _fused_linear(
    spec: FusedLinearSpec,
    *,
    linear: Callable[..., Any],
    rms_norm: Callable[..., Any] | None = None,
    silu_mul: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    def run(
        x: Tensor,
        packed: Any,  # noqa: ANN401
        *,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        out: Tensor,
    ) -> Tensor:
        if rms_norm is not None:
            x = rms_norm(x, norm_weight, eps=eps, out=torch.empty_like(x))
        if silu_mul is None and not spec.add:
            linear(x, packed, out=out)
            return out
        product = linear(x, packed, out=x.new_empty(len(x), spec.out_features))
        if silu_mul is not None:
            silu_mul(product, out=out)
        else:
            assert residual is not None, "the spec asks for it"
            torch.add(residual, product, out=out)  # elementwise: out may be residual
        return out

    return run


_COMPOSERS: dict[str, Callable[..., Callable[..., Any]]] = {
    "add_rms_norm": _add_rms_norm,
    "rope_kv_write": _rope_kv_write,
}
