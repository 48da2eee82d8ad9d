"""The next token of each row, drawn as its row of the tables asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.backends.torch_ref.random import gumbel_noise
from tvr.contract import BoundOp

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.contract import SamplingTables

_MOST_COUNTED = 2 * ((1 << 14) - 1)  # of a token, twice; what int16 holds beside the prompt's bit
_AT_ONCE = 1 << 20  # tokens whose noise is made at a time


def bind_sample() -> BoundOp:
    return BoundOp(run=_run)


def _run(
    logits: Tensor,
    rows: Tensor,
    output_positions: Tensor,
    tables: SamplingTables,
    last_token: Tensor,
    *,
    out: Tensor,
) -> Tensor:
    """out [R] int64: the token of each row of logits [R, vocab]; -1: its best is not finite.

    Mutates: last_token, and counts of rows with penalties. What rows need is read back from the
    device.
    """
    if not len(logits):
        return out
    x = logits.float()
    penalised = (
        (tables.repetition != 1) | (tables.presence != 0) | (tables.frequency != 0)
    )[rows].nonzero().flatten()  # fmt: skip
    if len(penalised):
        x = x.index_copy(0, penalised, _penalise(x[penalised], rows[penalised], tables))
    best, tokens = x.max(dim=-1)  # the first of equals; a NaN counts as the largest
    is_drawn = (tables.temperature[rows] > 0) & best.isfinite()
    drawn = is_drawn.nonzero().flatten()
    for some in torch.split(drawn, max(1, _AT_ONCE // x.shape[1])):
        of = rows[some], output_positions[some]
        tokens[some] = _draw(x[some], best[some], *of, tables)
    out.copy_(torch.where(best.isfinite(), tokens, -1))
    last_token[rows] = out.clamp(min=0)
    counted = penalised[out[penalised] >= 0]
    places = rows[counted], out[counted]
    counts = tables.counts[places]
    tables.counts[places] = torch.where(counts < _MOST_COUNTED, counts + 2, counts)
    return out


def _penalise(x: Tensor, rows: Tensor, tables: SamplingTables) -> Tensor:
    """Return logits [r, vocab] fp32 of rows [r] after their penalties."""
    counts = tables.counts[rows].int()  # [r, vocab]
    repetition = tables.repetition[rows, None]
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(counts > 0, repeated, x)
    in_output = counts >> 1
    x = x - tables.frequency[rows, None] * in_output
    return x - tables.presence[rows, None] * (in_output > 0)


def _draw(
    x: Tensor, best: Tensor, rows: Tensor, positions: Tensor, tables: SamplingTables
) -> Tensor:
    """Return the tokens [r] of rows [r] that are not greedy, of logits [r, vocab] fp32."""
    # Measured from the best, so that no temperature, however small, overflows.
    gaps = (best[:, None] - x) / tables.temperature[rows, None]
    gaps = gaps.masked_fill(gaps > tables.max_gap[rows, None], torch.inf)
    top_k, top_p = tables.top_k[rows], tables.top_p[rows]
    filtered = ((top_k < x.shape[1]) | (top_p < 1)).nonzero().flatten()
    if len(filtered):
        kept = _filter(gaps[filtered], top_k[filtered], top_p[filtered])
        gaps = gaps.index_copy(0, filtered, kept)
    noise = gumbel_noise(tables.seeds[rows], positions, x.shape[1])
    return (noise - gaps).argmax(dim=-1)  # the first of equals


def _filter(gaps: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return gaps [r, vocab] with all but the k smallest, then all past top_p, at infinity."""
    ordered, ids = gaps.sort(dim=-1, stable=True)  # of equals the lower id is first
    rank = torch.arange(gaps.shape[1], device=gaps.device)
    ordered = torch.where(rank < top_k[:, None], ordered, torch.inf)
    weights = ordered.double().neg().exp()  # fp64, so that the order of summing does not decide
    upto = weights.cumsum(dim=-1)
    in_nucleus = (upto - weights < top_p[:, None] * upto[:, -1:]) | (top_p >= 1)[:, None]
    return gaps.scatter(1, ids, torch.where(in_nucleus, ordered, torch.inf))
