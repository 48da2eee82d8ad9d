"""Random inputs of the ops on tables that have a row for each request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tvr.contract import PrepareStepSpec, SampleSpec, SamplingTables

if TYPE_CHECKING:
    from torch import Tensor

_SPARE_ROWS = 3  # of requests that are not in the step, before the one of padding
_MAX_LEN = 4160  # tokens that a row has room for: 260 blocks of 16
_NUM_BLOCKS = 100_000
_VOCAB_SIZE = 128_256
_UNWRITTEN_ID = -7
_SEEN = 0.1  # of a vocabulary, in the prompt or the output
_MOST_SEEN = 9  # times

#: The tables that `sample` is given as one object, and a `Call` has one by one.
TABLES = tuple(f.name for f in fields(SamplingTables))


class Asked(NamedTuple):
    """What a row asks for; by default nothing but the softmax itself."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


#: Every kind of row, in turn.
ASKED = (
    Asked(temperature=0.0),
    Asked(temperature=0.8, top_p=0.95, repetition=1.3, presence=0.5, frequency=0.25),
    Asked(),
    Asked(top_p=0.9),
    Asked(temperature=0.7, top_k=5),
    Asked(temperature=0.6, top_k=20, top_p=0.9),
    Asked(temperature=1.5, min_p=0.1, frequency=-0.5),
    Asked(temperature=0.0, repetition=0.7, presence=-0.5),
    Asked(temperature=2.0, min_p=0.01, top_k=50, top_p=0.3, repetition=1.1),
    Asked(temperature=0.3, top_p=0.05),
)


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


def sample_args(
    spec: SampleSpec, logits: Tensor, g: torch.Generator, asked: tuple[Asked, ...] = ASKED
) -> dict[str, Tensor]:
    """Return arguments of `sample` for logits [R, vocab], the tables one by one.

    Rows of the tables are what is `asked` for, in turn, from anywhere on; the last one is spare.
    """
    num_seqs, num_rows = len(logits), len(logits) + _SPARE_ROWS + 1
    start = int(torch.randint(len(asked), (), generator=g))
    of_row = [asked[(start + row) % len(asked)] for row in range(num_rows - 1)]
    of_row.append(Asked(temperature=0.0))  # of padding
    vocab = spec.vocab_size

    def table(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([getattr(row, name) for row in of_row], dtype=dtype)

    seen = torch.randint(1, 2 * _MOST_SEEN, (num_rows, vocab), generator=g)
    seen[torch.rand(num_rows, vocab, generator=g) >= _SEEN] = 0
    gaps = [-math.log(row.min_p) if row.min_p else math.inf for row in of_row]
    return {
        "logits": logits,
        "rows": torch.randperm(num_rows - 1, generator=g)[:num_seqs],
        "output_positions": torch.randint(5000, (num_seqs,), generator=g),
        "temperature": table("temperature"),
        "max_gap": torch.tensor(gaps),
        "top_k": torch.tensor([min(row.top_k or vocab, vocab) for row in of_row]),
        "top_p": table("top_p", torch.float64),
        "seeds": torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=g),
        "repetition": table("repetition"),
        "presence": table("presence"),
        "frequency": table("frequency"),
        "counts": seen.to(torch.int16),
        "last_token": torch.full((num_rows,), _UNWRITTEN_ID),
        "out": torch.full((num_seqs,), _UNWRITTEN_ID),
    }


def as_run_takes_them(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments with the tables of `sample`, if there are any, in one object."""
    if not args.keys() >= set(TABLES):
        return dict(args)
    rest = {name: value for name, value in args.items() if name not in TABLES}
    return rest | {"tables": SamplingTables(**{name: args[name] for name in TABLES})}


def one_by_one(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `run` was given with the tables of `sample` one by one."""
    rest = {name: value for name, value in args.items() if name != "tables"}
    return rest | {name: getattr(args["tables"], name) for name in TABLES if "tables" in args}
