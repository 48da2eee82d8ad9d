"""Log-probabilities of a token of each row, and of the likeliest tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.contract import LOGPROB_FLOOR, BoundOp, TopLogprobsSpec

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_INT32 = (1 << 31) - 1


def bind_top_logprobs(spec: TopLogprobsSpec) -> BoundOp:
    return BoundOp(run=_run_by_rows if spec.batch_invariant else _run)


def _run(
    logits: Tensor, tokens: Tensor, *, ids: Tensor, values: Tensor, ranks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [R, vocab]; tokens, ranks [R] int64; ids [R, 1 + k] int64; values [R, 1 + k] fp32.

    Ids are the tokens, then the k likeliest; ranks are by logits, the lower id first among equals.
    """
    x = logits.float()
    token = tokens.clamp(min=0)[:, None]  # [R, 1]
    own = x.gather(1, token)
    all_ids = torch.arange(x.shape[1], device=x.device)
    before = (x > own) | ((x == own) & (all_ids < token))
    ranks.copy_(before.sum(dim=-1) + 1)
    ids[:, :1] = token
    if ids.shape[1] > 1:
        ids[:, 1:] = _best(x, all_ids, ids.shape[1] - 1)
    below = x - x.amax(dim=-1, keepdim=True)  # NaN where the largest is not finite
    mass = below.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    values.copy_((below.gather(1, ids) - mass.log()).clamp(min=LOGPROB_FLOOR))
    return ids, values, ranks


def _run_by_rows(
    logits: Tensor, tokens: Tensor, *, ids: Tensor, values: Tensor, ranks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_run`, a row at a time: torch sums, and on a CPU exponentiates, by the batch's shape."""
    for i in range(len(logits)):
        row = slice(i, i + 1)
        _run(logits[row], tokens[row], ids=ids[row], values=values[row], ranks=ranks[row])
    return ids, values, ranks


def _best(x: Tensor, ids: Tensor, k: int) -> Tensor:
    """Return the ids [R, k] of the largest of x [R, vocab] fp32, of equals the lower first."""
    # As integers, floats are in order but for the negative ones, which are in reverse. With the id
    # below them no two keys are equal, and no device has a choice.
    bits = (x + 0.0).view(torch.int32)  # -0 becomes 0, its equal
    ordered = torch.where(bits < 0, bits ^ _LARGEST_INT32, bits)
    keys = (ordered.long() << 32) | (_LARGEST_INT32 - ids)
    return _LARGEST_INT32 - (keys.topk(k, dim=-1).values & _LARGEST_INT32)
