"""A step of tvr, told as FlashInfer wants it told."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.contract import StepMeta


@dataclass(frozen=True)
class Pages:
    """The rows of a step that see a key, and the pages of their sequences.

    FlashInfer plans on the host, so all but the page ids is there. S sequences, T rows.

    Attributes:
        qo_indptr: [S + 1] int32, host: running sum of rows.
        kv_indptr: [S + 1] int32, host: running sum of pages.
        last_page_len: [S] int32, host: tokens in each sequence's last page.
        indices: [kv_indptr[-1]] int32, device: page ids, sequence after sequence.
        rows: [T] int64, device: which rows of the step these are; None: all of them.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    indices: Tensor
    rows: Tensor | None

    @property
    def num_rows(self) -> int:
        return int(self.qo_indptr[-1])


def pages_of(step: StepMeta, q_lens: Sequence[int], block_size: int) -> Pages:
    """Return the pages of a step whose sequences have `q_lens` new tokens.

    Left out is what FlashInfer must not be given: sequences without keys or rows, and of a
    sequence with more rows than keys the first rows, which see none (the mask is aligned
    bottom-right, and FlashInfer's arithmetic for it takes keys for no fewer than rows).
    """
    kv_lens = step.seq_lens_cpu
    seen = [min(pair) for pair in zip(q_lens, kv_lens, strict=True)]  # rows that see a key
    live = [s for s, count in enumerate(seen) if count]
    counts = [-(-kv_lens[s] // block_size) for s in live]
    rows = None
    if seen != list(q_lens):
        ends = list(itertools.accumulate(q_lens))
        rows = [row for s in live for row in range(ends[s] - seen[s], ends[s])]
    return Pages(
        qo_indptr=_running_sum([seen[s] for s in live]),
        kv_indptr=_running_sum(counts),
        last_page_len=torch.tensor([(kv_lens[s] - 1) % block_size + 1 for s in live]).int(),
        indices=_indices(step.block_table, live, counts),
        rows=None if rows is None else _on_device(rows, step.block_table),
    )


def _indices(block_table: Tensor, live: list[int], counts: list[int]) -> Tensor:
    """Return the first counts[i] ids of each row live[i] of the table, one after another.

    What lies behind them in a row is garbage and is not read. Nothing waits for the device.
    """
    sequence, count = _on_device(live, block_table), _on_device(counts, block_table)
    total = sum(counts)
    first = count.cumsum(0) - count  # where each sequence's ids begin
    begin = torch.repeat_interleave(first, count, output_size=total)
    row = torch.repeat_interleave(sequence, count, output_size=total)
    column = torch.arange(total, device=block_table.device) - begin
    return block_table[row, column]


def _running_sum(lens: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)


def _on_device(values: list[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(like.device, non_blocking=True)
