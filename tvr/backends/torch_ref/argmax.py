"""Greedy choice of a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.contract import BoundOp

if TYPE_CHECKING:
    from torch import Tensor


def bind_argmax() -> BoundOp:
    return BoundOp(run=_run)


def _run(logits: Tensor, *, out: Tensor) -> Tensor:
    """out [T] int64: lowest id of the largest of logits [T, vocab]; -1 where a row holds NaN."""
    torch.argmax(logits, dim=-1, out=out)  # the first of equals; a NaN counts as the largest
    largest = logits.gather(1, out.unsqueeze(1)).squeeze(1)
    return out.masked_fill_(largest.isnan(), -1)
