"""The arrays of a step of decodes only, at addresses that never change, as a CUDA graph needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tvr.contract import StepMeta
from tvr.core.batch import DeviceTables, ForwardBatch
from tvr.core.schedule_output import Decodes

_NOTHING = -1  # in place of a position: padding; of a block id: the sequence takes no new block


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedDecodes:
    """A step of S decodes as the host sends it.

    Attributes:
        data: [S, 3] int32: row, position of the token to compute, and block id appended to the
            block table or -1.
        rows: those of `data`.
    """

    data: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    rows: list[int]

    @property
    def seq_lens(self) -> list[int]:
        """Tokens of each sequence, the one to compute included."""
        lens: list[int] = (self.data[:, 1] + 1).tolist()
        return lens


def pack_decodes(decodes: Decodes, next_index: list[int]) -> PackedDecodes:
    """Return a step of decodes only, packed for the device.

    Args:
        decodes: what the scheduler picked.
        next_index: for each row, how many block ids its table row holds.

    Mutates: `next_index`.
    """
    rows = decodes.rows
    data = np.empty((len(rows), 3), dtype=np.int32)
    data[:, 0] = rows
    data[:, 1] = decodes.starts
    data[:, 2] = _NOTHING
    for place, block in decodes.new_blocks.items():
        data[place, 2] = block
        next_index[rows[place]] += 1
    return PackedDecodes(data=data, rows=rows)


#: A step of nothing.
NO_DECODES = PackedDecodes(data=np.empty((0, 3), np.int32), rows=[])


class DecodeInputs:
    """Arrays for up to `size` sequences; a step of n uses the first n of each.

    `load` sends what the host knows, `prepare` makes the arrays of it on the device. What is past
    the step's sequences is padding: length 0, slot -1, position 0, and the tables' spare row.

    Args:
        tables: where rows keep their block tables and last tokens.
        prepare_step: the bound op's `run`.
        size: most sequences.
        max_seq_len: most tokens of a sequence, the bound that graphs are captured with.

    Attributes:
        rows, positions: [size] int64, as in `ForwardBatch`.
    """

    def __init__(
        self,
        tables: DeviceTables,
        prepare_step: Callable[..., Any],
        *,
        size: int,
        max_seq_len: int,
    ) -> None:
        device = tables.device
        self._tables = tables
        self._prepare_step = prepare_step
        self._max_seq_len = max_seq_len
        self._sent = torch.zeros(size, 3, dtype=torch.int32, device=device)
        self.rows = torch.zeros(size, dtype=torch.int64, device=device)
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self._input_ids = torch.zeros(size, dtype=torch.int64, device=device)
        self._slot_mapping = torch.full((size,), -1, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(size, dtype=torch.int32, device=device)
        self._block_table = torch.zeros(
            size, tables.block_table.shape[1], dtype=torch.int32, device=device
        )
        self._cu_seqlens_q = torch.arange(size + 1, dtype=torch.int32, device=device)

    def load(self, packed: PackedDecodes, size: int) -> None:
        """Start copying a step to the device, filled up with padding to `size` sequences."""
        on_host = torch.empty(size, 3, dtype=torch.int32, pin_memory=self._sent.is_cuda)
        padded, n = on_host.numpy(), len(packed.data)
        padded[:n] = packed.data
        padded[n:] = (self._tables.spare_row, _NOTHING, _NOTHING)
        self._sent[:size].copy_(on_host, non_blocking=True)

    def prepare(self, size: int) -> None:
        """Fill the arrays for `size` sequences from what was loaded and the tables.

        Mutates: the tables' `block_table`, by the step's new block ids.
        """
        self._prepare_step(
            self._sent[:size],
            self._tables.block_table,
            self._tables.last_token,
            input_ids=self._input_ids[:size],
            positions=self.positions[:size],
            rows=self.rows[:size],
            slot_mapping=self._slot_mapping[:size],
            seq_lens=self._seq_lens[:size],
            step_block_table=self._block_table[:size],
        )

    def batch(self, size: int) -> ForwardBatch:
        """Return the step of `size` sequences; host integers are the bounds."""
        meta = StepMeta(
            block_table=self._block_table[:size],
            seq_lens=self._seq_lens[:size],
            cu_seqlens_q=self._cu_seqlens_q[: size + 1],
            num_seqs=size,
            num_tokens=size,
            max_q_len=1,
            max_seq_len=self._max_seq_len,
            seq_lens_cpu=[self._max_seq_len] * size,
        )
        return ForwardBatch(
            input_ids=self._input_ids[:size],
            positions=self.positions[:size],
            slot_mapping=self._slot_mapping[:size],
            step=meta,
            decode=meta,
            prefill=None,
            num_decode_tokens=size,
            logit_rows=None,
        )


def with_real_lengths(batch: ForwardBatch, seq_lens: Sequence[int]) -> ForwardBatch:
    """Return a step of decodes with `seq_lens` for host integers; padding has length 0."""
    meta = replace(
        batch.step,
        max_seq_len=max(seq_lens),
        seq_lens_cpu=[*seq_lens, *[0] * (batch.step.num_seqs - len(seq_lens))],
    )
    return replace(batch, step=meta, decode=meta)
