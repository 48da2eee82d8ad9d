"""Plain data between the scheduler and whoever runs the steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tvr.core.sequence import Sequence


class Entry(NamedTuple):
    """One sequence's share of a step.

    Attributes:
        request_id, epoch: whose it is; a result must give both back.
        row: row of the device tables.
        start: position of its first token.
        num_tokens: tokens to compute.
        samples: whether a token is sampled after the last of them.
        logit_rows: how many of its last tokens need logits.
        new_block_ids: blocks to append to the row's block table.
    """

    request_id: str
    epoch: int
    row: int
    start: int
    num_tokens: int
    samples: bool
    logit_rows: int
    new_block_ids: tuple[int, ...]


class RowReset(NamedTuple):
    """A row changed hands: clear it. Its entry's `new_block_ids` start at block index 0."""

    row: int
    request_id: str


class Decodes(NamedTuple):
    """The decodes of a step, by columns: place i of each is of one sequence.

    Attributes:
        sequences: whose they are.
        epochs, rows, starts: as in `Entry`.
        new_blocks: by place, the block to append to the row's block table.
    """

    sequences: list[Sequence]
    epochs: list[int]
    rows: list[int]
    starts: list[int]
    new_blocks: dict[int, int]

    def entries(self) -> list[Entry]:
        """Return them one by one."""
        entries = []
        columns = (self.sequences, self.epochs, self.rows, self.starts)
        for place, (seq, epoch, row, start) in enumerate(zip(*columns, strict=True)):
            block = self.new_blocks.get(place)
            blocks = () if block is None else (block,)
            entries.append(Entry(seq.request_id, epoch, row, start, 1, True, 1, blocks))
        return entries


@dataclass(slots=True)
class ScheduleOutput:
    """A step to run.

    Attributes:
        step_id: counts up from 0.
        decodes: one token of each of some sequences, sampled by an earlier step, perhaps one in
            flight: the device has it, the host may not.
        chunks: prefill chunks. The tokens of one are
            `sequence.token_ids[start : start + num_tokens]`.
        num_tokens: tokens of all of these.
        preempted: sequences that lost their row and blocks since the previous step.
        row_resets: rows to clear before the step, one for each sequence that (re)starts.
    """

    step_id: int
    decodes: Decodes
    chunks: list[Entry]
    num_tokens: int
    preempted: list[str]
    row_resets: list[RowReset]
    _entries: list[Entry] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def num_decodes(self) -> int:
        """How many entries are decodes."""
        return len(self.decodes.rows)

    @property
    def entries(self) -> list[Entry]:
        """Decodes, then prefill chunks: one list, made when it is first read."""
        if self._entries is None:
            self._entries = self.decodes.entries() + self.chunks
        return self._entries


class Result(NamedTuple):
    """What a step gave for one entry that samples.

    Attributes:
        request_id, epoch: the entry's.
        token: the sampled token; None: there is none, and the sequence ends with an error.
        error: why the sequence must end, if it must.
        logprobs: passed through to the `SequenceUpdate`.
    """

    request_id: str
    epoch: int
    token: int | None
    error: str | None = None
    logprobs: object = None


class SequenceUpdate(NamedTuple):
    """What a step's results did to one live sequence.

    Attributes:
        sequence: the sequence; its `token_ids` already end with `token`.
        token: the new token, or None after an error.
        finish_reason: "stop", "length" or "error" if it ended, else None.
        error: the reason of an error.
        logprobs: the result's.
    """

    sequence: Sequence
    token: int | None
    finish_reason: str | None
    error: str | None
    logprobs: object
