"""Sampling on the device: logits and per-row state in, one token per row out.

Noise replaces the walk along a cumulative distribution: the largest `logit / T + gumbel` is a
draw from the softmax, and needs neither softmax nor sort. What a row needs is known on the host
when the row is set up, so rows are split by need without waiting for the device:

    greedy   the argmax op on the logits as they are
    plain    temperature, min_p: noise over the vocabulary
    narrow   a small top_k: the best k tokens, and noise for those only
    nucleus  top_p alone: the best tokens as on the CPU mostly suffice, or all
    wide     a large top_k: all tokens sorted

Each row's result depends on its own logits and state only, bit for bit on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tvr.core.device_copy import to_index
from tvr.core.draw import Draw
from tvr.core.sampler_state import Kind, RowNeeds, SamplerState

__all__ = ["SamplerState", "child_seed", "greedy_tokens", "sample"]

_WORD = (1 << 64) - 1


def child_seed(seed: int, index: int) -> int:
    """Return the int64 seed of completion `index` of a request with n > 1.

    Completion 0 has the request's own seed, so it equals the same request with n = 1. Completion
    i has output i of the SplitMix64 generator started at `seed`.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014, figure 14.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def sample(
    logits: Tensor,
    state: SamplerState,
    rows: Tensor,
    output_positions: Tensor,
    argmax: Callable[..., Tensor],
    *,
    host_rows: Sequence[int] | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """Return the next token of each row, and count it for the row's penalties and bad words.

    Args:
        logits: [R, vocab] activation dtype.
        state: what each row asks for.
        rows: [R] int64, distinct rows of `state`.
        output_positions: [R] int64, 0 for a request's first generated token.
        argmax: the bound argmax op for the logits' dtype.
        host_rows: `rows` on the host. Without it they are read back, which waits for the device.
        allowed: [R, ceil(vocab / 32)] int32, tokens allowed besides the rows' own rules: bit
            `id % 32`, counted from the lowest, of word `id // 32`. None: all.

    Returns:
        [R] int64. -1 for a row whose largest logit is not finite: a NaN, an infinity, or every
        token ruled out.

    Mutates: the counts and last tokens of `state`.
    """
    needs = state.needs(rows.tolist() if host_rows is None else host_rows)
    total, device = len(needs), logits.device
    is_greedy = [n.kind is Kind.GREEDY and not n.adjusted and allowed is None for n in needs]
    if all(is_greedy):
        return greedy_tokens(logits, argmax)

    greedy = [i for i, simple in enumerate(is_greedy) if simple]
    scored = [i for i, simple in enumerate(is_greedy) if not simple]
    tokens = torch.empty(total, dtype=torch.int64, device=device)
    index = to_index(scored, total, device)
    tokens[index] = _from_scores(
        logits[index].float(),
        state,
        [needs[i] for i in scored],
        rows[index],
        output_positions[index],
        None if allowed is None else allowed[index],
    )
    if greedy:
        index = to_index(greedy, total, device)
        tokens[index] = greedy_tokens(logits[index], argmax)
    return tokens


def greedy_tokens(logits: Tensor, argmax: Callable[..., Tensor]) -> Tensor:
    """Return the argmax op's answer [r], -1 where the largest logit is not finite."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    tokens = argmax(logits, out=tokens)  # -1 where there is a NaN
    best = logits.gather(1, tokens.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(best.isfinite(), tokens, -1)


def _from_scores(
    logits: Tensor,
    state: SamplerState,
    needs: list[RowNeeds],
    rows: Tensor,
    positions: Tensor,
    allowed: Tensor | None,
) -> Tensor:
    """Return the tokens [r] of rows that need more than the argmax; logits [r, vocab] fp32."""
    total, device = len(needs), logits.device
    adjusted = [i for i, n in enumerate(needs) if n.adjusted or allowed is not None]
    if adjusted:
        index = to_index(adjusted, total, device)
        words = None if allowed is None else allowed[index]
        some = [needs[i] for i in adjusted]
        changed = state.adjust(logits[index], some, rows[index], positions[index], words)
        logits = logits.clone()  # it may be the caller's tensor
        logits[index] = changed
    best, tokens = logits.max(dim=-1)  # the lowest id of the largest: right for greedy rows

    for kind in (Kind.PLAIN, Kind.NARROW, Kind.NUCLEUS, Kind.WIDE):
        places = [i for i, n in enumerate(needs) if n.kind is kind]
        if places:
            index = to_index(places, total, device)
            draw = _draw(state, logits[index], best[index], rows[index], positions[index])
            tokens[index] = draw.take(kind, max(needs[i].width for i in places))
    tokens = torch.where(best.isfinite(), tokens, -1)
    state.record(needs, rows, tokens)
    return tokens


def _draw(
    state: SamplerState, logits: Tensor, best: Tensor, rows: Tensor, positions: Tensor
) -> Draw:
    """Return the draw for `logits` [r, vocab] fp32 whose largest are `best` [r]."""
    # Measured from the best, so that no temperature, however small, overflows.
    gaps = (best[:, None] - logits) / state.tables.temperature[rows, None]
    gaps = gaps.masked_fill_(gaps > state.tables.max_gap[rows, None], torch.inf)
    return Draw(
        gaps,
        state.tables.top_k[rows],
        state.tables.top_p[rows],
        state.tables.seeds[rows],
        positions,
    )
