"""`prepare_step`: the arrays of a step of decodes, gathered from tables that have a row a request.

All on the device, so that a step can be one CUDA graph: the host sends what changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tvr.contract import BoundOp, Box, PrepareStepSpec

if TYPE_CHECKING:
    from torch import Tensor

BOXES = [
    Box(
        dtypes=("float32", "float16", "bfloat16"),
        devices=("cpu", "cuda"),
        flags=frozenset({"cuda_graph", "deterministic"}),
    )
]


def bind(spec: PrepareStepSpec) -> BoundOp:
    """Return the op for blocks of `spec.block_size`; a kernel would be compiled here."""
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
        """entries [S, 3] int32: row, position (-1: padding), new block id (-1: none).

        block_table [rows, max_blocks] int32, which gets the new ids; last_token [rows] int64.
        """
        is_padding, is_new = entries[:, 1] < 0, entries[:, 2] >= 0
        rows.copy_(entries[:, 0])
        positions.copy_(entries[:, 1].masked_fill(is_padding, 0))
        seq_lens.copy_(entries[:, 1] + 1)
        input_ids.copy_(last_token[rows])
        column = positions // block_size
        # Where there is no new id the old one is stored again.
        block = torch.where(is_new, entries[:, 2], block_table[rows, column])
        block_table[rows, column] = block
        step_block_table.copy_(block_table[rows])
        # As int64: in a large pool slot numbers pass 2^31.
        slot_mapping.copy_(block.long() * block_size + positions % block_size)
        slot_mapping.masked_fill_(is_padding, -1)
        return input_ids, positions, rows, slot_mapping, seq_lens, step_block_table

    return BoundOp(run=run)
