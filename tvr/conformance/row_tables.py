"""Random inputs of the ops on tables that have a row for each request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from tvr.contract import PrepareStepSpec

_SPARE_ROWS = 3  # of requests that are not in the step, before the one of padding
_MAX_LEN = 4160  # tokens that a row has room for: 260 blocks of 16
_NUM_BLOCKS = 100_000
_VOCAB_SIZE = 128_256
_UNWRITTEN_ID = -7


def step_args(spec: PrepareStepSpec, num_seqs: int, g: torch.Generator) -> dict[str, Tensor]:
    """Return arguments of `prepare_step`: sequences of all lengths, padding in the middle.

    The first three sequences begin, fill a block, and begin one. Every other one gets a new block
    id, wherever it is: the op does not ask whether it is time for one.
    """
    max_blocks = -(-_MAX_LEN // spec.block_size)
    num_rows = num_seqs + _SPARE_ROWS + 1
    block_table = torch.randint(_NUM_BLOCKS, (num_rows, max_blocks), generator=g)
    starts = torch.randint(max_blocks * spec.block_size, (num_seqs,), generator=g)
    starts[:3] = torch.tensor([0, spec.block_size - 1, spec.block_size])[:num_seqs]
    starts[-1:] = max_blocks * spec.block_size - 1
    new_blocks = torch.randint(_NUM_BLOCKS, (num_seqs,), generator=g)
    new_blocks[::2] = -1
    rows = torch.randperm(num_rows - 1, generator=g)[:num_seqs]
    entries = torch.stack((rows, starts, new_blocks), dim=1).int()
    if num_seqs > 3:
        entries[num_seqs // 2] = padding_entry(block_table)

    def unwritten(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(shape, _UNWRITTEN_ID, dtype=dtype)

    return {
        "entries": entries,
        "block_table": block_table.int(),
        "last_token": torch.randint(_VOCAB_SIZE, (num_rows,), generator=g),
        "input_ids": unwritten(num_seqs),
        "positions": unwritten(num_seqs),
        "rows": unwritten(num_seqs),
        "slot_mapping": unwritten(num_seqs),
        "seq_lens": unwritten(num_seqs, dtype=torch.int32),
        "step_block_table": unwritten(num_seqs, max_blocks, dtype=torch.int32),
    }


def padding_entry(table: Tensor) -> Tensor:
    """Return the entry [3] int32 of padding, beside a table by row: its last row is nobody's."""
    return torch.tensor([len(table) - 1, -1, -1], dtype=torch.int32, device=table.device)
