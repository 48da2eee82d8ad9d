"""`rope`: turn the two halves of each head by the angle of its token's position."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.contract import BoundOp, Box, RopeSpec

if TYPE_CHECKING:
    from torch import Tensor

BOXES = [
    Box(
        dtypes=("float32", "float16", "bfloat16"),
        devices=("cpu", "cuda"),
        fields=frozenset({"rotary_dim"}),
        flags=frozenset({"cuda_graph", "deterministic"}),
    )
]


def bind(spec: RopeSpec) -> BoundOp:
    """Return the op for heads of `spec.head_dim`; a kernel would be compiled here."""
    return BoundOp(run=run)


def run(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    q_out: Tensor,
    k_out: Tensor,
) -> tuple[Tensor, Tensor]:
    """q, q_out [T, H, D]; k, k_out [T, KVH, D]; positions [T] int64.

    cos_sin_cache [max_position, rotary_dim] fp32 holds the cosines, then the sines. The outputs
    may be the inputs.
    """
    if positions.dtype != torch.int64:
        raise TypeError(f"rope: positions are {positions.dtype}; they must be torch.int64")
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)  # [T, 1, half]
    half = cos.shape[-1]
    for x, out in ((q, q_out), (k, k_out)):
        # Channel i turns with channel i + half; those behind rotary_dim pass.
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        rest = x[..., 2 * half :].float()
        turned = (first * cos - second * sin, second * cos + first * sin, rest)
        out.copy_(torch.cat(turned, dim=-1))  # fp32 until here: rounded once
    return q_out, k_out
