"""What the `sample` op knows of every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingTables:
    """Device tables with a row for each request; `sample` writes `counts` and reads the others.

    Attributes:
        temperature: [rows] fp32; 0: greedy.
        max_gap: [rows] fp32, -log(min_p), how far a token may be below the best; infinity: off.
        top_k: [rows] int64, at least 1; the vocabulary's size or more: off.
        top_p: [rows] fp64, above 0; 1: off.
        seeds: [rows] int64.
        repetition, presence, frequency: [rows] fp32 penalties; 1, 0 and 0: off.
        counts: [rows, vocab] int16, twice how often the row's output has a token, up to 16,383,
            and 1 more if its prompt has it. Rows whose penalties are off are not looked at.
    """

    temperature: Tensor
    max_gap: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    counts: Tensor
