"""`linear`: out = x @ weight.T (+ bias)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from tvr.contract import BoundOp, Box, LinearSpec

if TYPE_CHECKING:
    from torch import Tensor

BOXES = [
    Box(
        dtypes=("float32", "float16", "bfloat16"),
        devices=("cpu", "cuda"),
        fields=frozenset({"bias"}),
        flags=frozenset({"cuda_graph", "deterministic"}),
    )
]


def bind(spec: LinearSpec) -> BoundOp:
    """Return the op for one weight shape.

    `BoundOp(pack=...)` could lay each weight out anew when the model is loaded, as a kernel likes
    it. Without, `run` is given the pair (weight, bias).
    """
    return BoundOp(run=run)


def run(x: Tensor, packed: tuple[Tensor, Tensor | None], *, out: Tensor) -> Tensor:
    """x [T, in]; weight [out, in]; bias [out] or None; out [T, out]."""
    weight, bias = packed
    return out.copy_(functional.linear(x, weight, bias))
