"""`argmax`: the token id of the largest logit of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.contract import ArgmaxSpec, BoundOp, Box

if TYPE_CHECKING:
    from torch import Tensor

BOXES = [
    Box(
        dtypes=("float32", "float16", "bfloat16"),
        devices=("cpu", "cuda"),
        flags=frozenset({"cuda_graph", "deterministic"}),
    )
]


def bind(spec: ArgmaxSpec) -> BoundOp:
    """Return the op for rows of `spec.vocab_size`; a kernel would be compiled here."""
    return BoundOp(run=run)


def run(logits: Tensor, *, out: Tensor) -> Tensor:
    """logits [T, vocab]; out [T] int64: the lowest id among equals, -1 for a row with a NaN."""
    largest, ids = logits.max(dim=-1)  # the first of equals; a NaN counts as the largest
    return out.copy_(ids.masked_fill(largest.isnan(), -1))
