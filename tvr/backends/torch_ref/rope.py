"""Rotary position embedding, rotate-half form: channel i turns with channel i + rotary_dim/2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.backends.torch_ref.kv import write_kv
from tvr.contract import BoundOp, RopeKvWriteSpec, RopeSpec
from tvr.errors import ConfigError, KernelError

if TYPE_CHECKING:
    from torch import Tensor


def bind_rope(spec: RopeSpec) -> BoundOp:
    rotary_dim = spec.rotary_dim or spec.head_dim

    def run(
        q: Tensor,
        k: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        *,
        q_out: Tensor,
        k_out: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Rotate the first `rotary_dim` channels of q and k in fp32; the others pass."""
        cos, sin = _angles(positions, cos_sin_cache)  # [T, 1, rotary_dim / 2] each
        _rotate(q, cos, sin, rotary_dim, q_out)
        _rotate(k, cos, sin, rotary_dim, k_out)
        return q_out, k_out

    return BoundOp(run=run)


def bind_rope_kv_write(spec: RopeKvWriteSpec) -> BoundOp:
    rope = bind_rope(spec).run

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
        """`rope`, then `kv_write` of the rotated k and of v."""
        rope(q, k, positions, cos_sin_cache, q_out=q_out, k_out=k_out)
        write_kv(k_out, v, k_cache, v_cache, slot_mapping)
        return q_out, k_out

    return BoundOp(run=run)


def _angles(positions: Tensor, cos_sin_cache: Tensor) -> tuple[Tensor, Tensor]:
    if positions.dtype != torch.int64:
        raise ConfigError(f"rope: positions are {positions.dtype}; the contract says int64")
    try:
        rows = cos_sin_cache.index_select(0, positions)
    except (IndexError, RuntimeError) as e:
        raise KernelError(
            "rope: a position lies outside the cos_sin_cache of "
            f"{cos_sin_cache.shape[0]} rows ({e})"
        ) from e
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    return cos, sin


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int, out: Tensor) -> None:
    """out = x turned; out may be x, so both halves are computed before either is stored."""
    half = rotary_dim // 2
    x1, x2 = x[..., :half].float(), x[..., half:rotary_dim].float()
    # Separate products and sums: a fused multiply-add would round otherwise than the checkpoint's
    # own implementation, which fp32 parity is held to.
    y1 = x1 * cos - x2 * sin
    y2 = x2 * cos + x1 * sin
    out[..., :half].copy_(y1)
    out[..., half:rotary_dim].copy_(y2)
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:].copy_(x[..., rotary_dim:])
