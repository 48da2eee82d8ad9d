"""`top_logprobs`: log-probabilities of a token of each row, and of the likeliest tokens.

What is likelier goes by the logits, and among equals by the id: log-probabilities are rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.contract import LOGPROB_FLOOR, BoundOp, Box, TopLogprobsSpec

if TYPE_CHECKING:
    from torch import Tensor

BOXES = [
    Box(
        dtypes=("float32", "float16", "bfloat16"),
        devices=("cpu", "cuda"),
        flags=frozenset({"cuda_graph", "deterministic"}),
    )
]


def bind(spec: TopLogprobsSpec) -> BoundOp:
    """Return the op for rows of `spec.vocab_size`; a kernel would be compiled here."""
    return BoundOp(run=run)


def run(
    logits: Tensor, tokens: Tensor, *, ids: Tensor, values: Tensor, ranks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [R, vocab]; tokens, ranks [R] int64; ids [R, 1 + k] int64, values [R, 1 + k] fp32.

    A token below 0 counts as 0. A row whose best logit is not finite gives NaN.
    """
    x = logits.float()
    token = tokens.clamp(min=0).unsqueeze(1)
    # The sort is stable: of equals the lower id comes first.
    order = x.argsort(dim=-1, descending=True, stable=True)
    ranks.copy_((order == token).int().argmax(dim=-1) + 1)
    ids.copy_(torch.cat([token, order[:, : ids.shape[1] - 1]], dim=1))
    below = x - x.amax(dim=-1, keepdim=True)  # at most 0: no exponential overflows
    mass = below.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    values.copy_((below.gather(1, ids) - mass.log()).clamp(min=LOGPROB_FLOOR))
    return ids, values, ranks
