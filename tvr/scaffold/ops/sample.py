"""`sample`: the next token of each row, drawn as the row's parameters ask.

The largest `noise - gap` is a draw from the softmax, a gap being how far a logit is below the best
over the temperature. So nothing is summed but for top_p, and nothing sorted but for top_k and
top_p. The noise is a function of seed, output position and token id, the same on every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.contract import BoundOp, Box, SampleSpec

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.contract import SamplingTables

# No "cuda_graph": the host reads what each row asks for.
BOXES = [
    Box(
        dtypes=("float32", "float16", "bfloat16"),
        devices=("cpu", "cuda"),
        flags=frozenset({"deterministic"}),
    )
]

MASK = 0xFFFFFFFF
MOST_COUNTED = 2 * 16383


def bind(spec: SampleSpec) -> BoundOp:
    """Return the op for rows of `spec.vocab_size`; a kernel would be compiled here."""
    return BoundOp(run=run)


def run(
    logits: Tensor,
    rows: Tensor,
    output_positions: Tensor,
    tables: SamplingTables,
    last_token: Tensor,
    *,
    out: Tensor,
) -> Tensor:
    """logits [R, vocab]; rows, output_positions, out [R] int64; last_token [rows] int64.

    A row whose best logit is not finite gives -1.
    """
    for i, row in enumerate(rows.tolist()):
        counts = tables.counts[row]
        x = logits[i].float()
        penalties = [t[row] for t in (tables.repetition, tables.presence, tables.frequency)]
        is_penalised = [float(p) for p in penalties] != [1.0, 0.0, 0.0]
        if is_penalised:
            x = penalised(x, counts.int(), *penalties)
        best = x.max()  # a NaN counts as the largest
        if not best.isfinite():
            out[i], last_token[row] = -1, 0
            continue
        token = x.argmax()  # the first of equals
        if tables.temperature[row] > 0:
            gaps = (best - x) / tables.temperature[row]
            gaps[gaps > tables.max_gap[row]] = torch.inf
            gaps = nearest(gaps, int(tables.top_k[row]), float(tables.top_p[row]))
            noise = gumbel(tables.seeds[row], output_positions[i], len(x))
            token = (noise - gaps).argmax()
        out[i] = last_token[row] = token
        if is_penalised and counts[token] < MOST_COUNTED:
            counts[token] += 2
    return out


def penalised(
    x: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """x [vocab] fp32; counts [vocab]: twice how often the output has it, 1 more if the prompt."""
    in_output = counts >> 1
    x = torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * in_output - presence * (in_output > 0)


def nearest(gaps: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return gaps [vocab] with all but the k smallest, then all past top_p, at infinity."""
    if top_k >= len(gaps) and top_p >= 1:
        return gaps
    ordered, ids = gaps.sort(stable=True)  # of equals the lower id is first
    ordered[top_k:] = torch.inf
    if top_p < 1:
        weights = (-ordered.double()).exp()
        before = weights.cumsum(0) - weights
        ordered[before >= top_p * weights.sum()] = torch.inf
    return torch.empty_like(gaps).scatter_(0, ids, ordered)


def gumbel(seed: Tensor, position: Tensor, size: int) -> Tensor:
    """Return -log(-log(u)) [size] fp32: word `id % 4` of Philox4x32-10 at id // 4 makes u."""
    block = torch.arange(-(-size // 4), device=seed.device)
    zero = torch.zeros_like(block)
    a, b, c, d = zero + (position & MASK), block, zero, zero
    k, m = seed & MASK, (seed >> 32) & MASK
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57  # they wrap, and keep all 64 bits
        a, b = ((q >> 32) ^ b ^ k) & MASK, q & MASK
        c, d = ((p >> 32) ^ d ^ m) & MASK, p & MASK
        k, m = (k + 0x9E3779B9) & MASK, (m + 0xBB67AE85) & MASK
    words = torch.stack((a, b, c, d), dim=1).flatten()[:size]
    return -(-((words.double() + 0.5) / 2**32).log()).log().float()
