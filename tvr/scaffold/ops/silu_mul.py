"""`silu_mul`: out = silu(gate) * up, the activation of a Llama MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import silu

from tvr.contract import BoundOp, Box, SiluMulSpec

if TYPE_CHECKING:
    from torch import Tensor

BOXES = [
    Box(
        dtypes=("float32", "float16", "bfloat16"),
        devices=("cpu", "cuda"),
        flags=frozenset({"cuda_graph", "deterministic"}),
    )
]


def bind(spec: SiluMulSpec) -> BoundOp:
    """Return the op for `spec.intermediate_size` columns; a kernel would be compiled here."""
    return BoundOp(run=run)


def run(x: Tensor, *, out: Tensor) -> Tensor:
    """x [T, 2 * I], gate columns then up columns; out [T, I]."""
    gate, up = x.float().chunk(2, dim=-1)  # [T, I] each
    return out.copy_(silu(gate) * up)  # fp32 until here: rounded once
