"""What the arrays of a step of decodes are, in plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class StepOfDecodes(NamedTuple):
    """One item a sequence.

    Attributes:
        block_ids: those of the sequence's blocks, as many as it has.
        tables: every row's block ids after the step.
    """

    input_ids: list[int]
    positions: list[int]
    rows: list[int]
    slot_mapping: list[int]
    seq_lens: list[int]
    block_ids: list[list[int]]
    tables: list[list[int]]


def step_of_decodes(
    block_size: int, entries: Tensor, block_table: Tensor, last_token: Tensor
) -> StepOfDecodes:
    """Return the step of `entries` [S, 3]: row, position and new block id, -1 for none."""
    tables, tokens = block_table.tolist(), last_token.tolist()
    step = StepOfDecodes([], [], [], [], [], [], tables)
    for row, start, new_block in entries.tolist():
        is_padding = start == -1
        position = 0 if is_padding else start
        block, offset = divmod(position, block_size)
        if new_block != -1:
            tables[row][block] = new_block
        step.input_ids.append(tokens[row])
        step.positions.append(position)
        step.rows.append(row)
        step.slot_mapping.append(-1 if is_padding else tables[row][block] * block_size + offset)
        step.seq_lens.append(start + 1)
        step.block_ids.append([] if is_padding else tables[row][: block + 1])
    return step
