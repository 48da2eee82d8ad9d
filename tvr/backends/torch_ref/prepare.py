"""The arrays of a step of decodes, from tables by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.contract import BoundOp, PrepareStepSpec

if TYPE_CHECKING:
    from torch import Tensor


def bind_prepare_step(spec: PrepareStepSpec) -> BoundOp:
    block_size = spec.block_size

    def run(
        entries: Tensor,
        block_table: Tensor,
        last_token: Tensor,
        *,
        input_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        slot_mapping: Tensor,
        seq_lens: Tensor,
        step_block_table: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """entries [S, 3] int32; tables by row; outputs [S], and a block table [S, max_blocks].

        Mutates: block_table, by the entries' new block ids.
        """
        entry_rows, starts, new_blocks = entries.unbind(1)
        rows.copy_(entry_rows)
        positions.copy_(starts.clamp(min=0))
        columns = positions // block_size
        # What stays is stored again: to leave it out the host would have to count.
        blocks = torch.where(new_blocks >= 0, new_blocks, block_table[rows, columns])
        block_table[rows, columns] = blocks
        torch.index_select(block_table, 0, rows, out=step_block_table)
        torch.index_select(last_token, 0, rows, out=input_ids)
        seq_lens.copy_(starts + 1)
        # int64 before the product: slot numbers pass 2^31 in large pools.
        slots = blocks.long() * block_size + positions % block_size
        slot_mapping.copy_(torch.where(starts >= 0, slots, -1))
        return input_ids, positions, rows, slot_mapping, seq_lens, step_block_table

    return BoundOp(run=run)
