"""Plain data between the scheduler and whoever runs the steps."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(slots=True)
class ScheduleOutput:
    """A step to run.

    Attributes:
        step_id: counts up from 0.
        entries: decodes, then prefill chunks. A decode's token was sampled by an earlier step,
            perhaps one in flight: the device has it, the host may not. The tokens of a prefill
            chunk are `sequence.token_ids[start : start + num_tokens]`.
        num_decodes: how many entries are decodes.
        num_tokens: tokens of all entries.
        preempted: sequences that lost their row and blocks since the previous step.
        row_resets: rows to clear before the step, one for each sequence that (re)starts.
    """

    step_id: int
    entries: list[Entry]
    num_decodes: int
    num_tokens: int
    preempted: list[str]
    row_resets: list[RowReset]


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
