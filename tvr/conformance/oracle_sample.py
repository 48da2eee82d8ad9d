"""Which token a row's parameters ask for: rounded to fp32 where docs/numerics.md rounds, else fp64.

Written in NumPy from that page; nothing is shared with a backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]

#: Sums in fp64 differ by their order. Where a token's mass is this near to top_p, as a share of the
#: whole, it may be in the nucleus or not.
NUCLEUS_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class RowParams:
    """What one row asks for, as in `SamplingTables`, and its output position."""

    temperature: float
    max_gap: float
    top_k: int
    top_p: float
    seed: int
    position: int
    repetition: float
    presence: float
    frequency: float

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change its logits."""
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)


def allowed_tokens(logits: Floats, counts: npt.NDArray[np.int16], row: RowParams) -> set[int]:
    """Return the tokens that may be chosen: one, or more where the nucleus ends on a rounding.

    Args:
        logits: [vocab] fp32.
        counts: [vocab], twice the count in the output, and 1 more for the prompt.
        row: what is asked for.
    """
    logits = _penalised(logits, counts, row) if row.penalised else logits
    best = logits.max()
    if not np.isfinite(best):
        return {-1}
    if row.temperature == 0:
        return {int(logits.argmax())}
    with np.errstate(over="ignore"):
        gaps = (best - logits) / np.float32(row.temperature)
    gaps[gaps > np.float32(row.max_gap)] = np.inf
    order = np.lexsort((np.arange(len(gaps)), gaps))  # smaller gaps first, then lower ids
    order = order[np.isfinite(gaps[order])][: row.top_k]
    scores = _noise(row, len(gaps)) - gaps
    sizes = {len(order)} if row.top_p >= 1 else _nucleus_sizes(gaps[order], row.top_p)
    tokens = set()
    for size in sizes:
        kept = np.sort(order[:size])
        tokens.add(int(kept[scores[kept].argmax()]))
    return tokens


def _penalised(logits: Floats, counts: npt.NDArray[np.int16], row: RowParams) -> Floats:
    repetition, presence, frequency = (
        np.float32(x) for x in (row.repetition, row.presence, row.frequency)
    )
    in_output = counts >> 1
    with np.errstate(over="ignore", invalid="ignore"):
        repeated = np.where(logits > 0, logits / repetition, logits * repetition)
        logits = np.where(counts != 0, repeated, logits)
        logits = logits - frequency * in_output.astype(np.float32)
        logits = logits - presence * (in_output > 0).astype(np.float32)
    return logits


def _nucleus_sizes(gaps: Floats, top_p: float) -> range:
    """Return how many tokens of rising gap [n] may be the nucleus."""
    weights = np.exp(-gaps.astype(np.float64))
    total = weights.sum()
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    slack = NUCLEUS_SLACK * total
    fewest, most = ((before < top_p * total + step).sum() for step in (-slack, slack))
    return range(max(1, int(fewest)), max(1, int(most)) + 1)


def _noise(row: RowParams, vocab_size: int) -> Floats:
    """Return each token's Gumbel noise [vocab]: fp64 logarithms, rounded to fp32."""
    blocks = np.arange(-(-vocab_size // 4), dtype=np.uint64)
    words = np.stack(_philox(blocks, row.position, row.seed), axis=1).reshape(-1)[:vocab_size]
    u = (words.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log(u))).astype(np.float32)


def _philox(blocks: Words, position: int, seed: int) -> list[Words]:
    """Return the four words of Philox4x32-10 at counters (position, block, 0, 0)."""
    low = np.uint64(0xFFFFFFFF)
    x = [np.full_like(blocks, position) & low, blocks, np.zeros_like(blocks), np.zeros_like(blocks)]
    for i in range(10):
        keys = (seed + i * 0x9E3779B9, (seed >> 32) + i * 0xBB67AE85)
        first, second = (np.uint64(key & 0xFFFFFFFF) for key in keys)
        a, c = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        high_a, high_c = a >> np.uint64(32), c >> np.uint64(32)
        x = [high_c ^ x[1] ^ first, c & low, high_a ^ x[3] ^ second, a & low]
    return x
