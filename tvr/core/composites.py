"""Composite ops built from their parts, for when no backend should serve them whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tvr.contract import COMPOSITES, SPECS, BoundOp, OpSpec


def part_specs(spec: OpSpec) -> list[OpSpec]:
    """Return the specs of the parts of `spec`, in calling order; empty for a plain op.

    Every field of a part is a field of the composite too.
    """
    parts = [SPECS[op] for op in COMPOSITES.get(spec.op, ())]
    return [cls(**{f.name: getattr(spec, f.name) for f in fields(cls)}) for cls in parts]


def compose(op: str, parts: list[BoundOp]) -> BoundOp:
    """Return `op` as calls of its bound `parts`, which keep their own plans and workspaces."""
    return BoundOp(run=_COMPOSERS[op](*(part.run for part in parts)))


def _add_rms_norm(rms_norm: Callable[..., Any]) -> Callable[..., Any]:
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


def _rope_kv_write(rope: Callable[..., Any], kv_write: Callable[..., Any]) -> Callable[..., Any]:
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


_COMPOSERS: dict[str, Callable[..., Callable[..., Any]]] = {
    "add_rms_norm": _add_rms_norm,
    "rope_kv_write": _rope_kv_write,
}
