"""The scheduler and the block manager, as a library: standard library only.

They decide which tokens run in which step and where their K and V go; what a step computes is
yours. A loop that drives them with a stand-in for a model, which says the last token plus one:

    >>> from tvr.core import Result, Scheduler, Sequence
    >>> scheduler = Scheduler(
    ...     num_blocks=64, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256
    ... )
    >>> seqs = {"a": Sequence("a", [1, 2, 3], max_tokens=4), "b": Sequence("b", [7], max_tokens=2)}
    >>> for seq in seqs.values():
    ...     scheduler.add(seq)
    >>> last_token = {}  # by row, as a device keeps it
    >>> while (step := scheduler.schedule()) is not None:
    ...     for index, entry in enumerate(step.entries):
    ...         if index >= step.num_decodes:  # a prefill chunk: the host knows its tokens
    ...             end = entry.start + entry.num_tokens
    ...             last_token[entry.row] = seqs[entry.request_id].token_ids[end - 1]
    ...         last_token[entry.row] += 1
    ...     results = [
    ...         Result(entry.request_id, entry.epoch, last_token[entry.row])
    ...         for entry in step.entries if entry.samples
    ...     ]
    ...     for update in scheduler.update(step.step_id, results):
    ...         if update.finish_reason:
    ...             print(update.sequence.request_id, update.sequence.output_token_ids)
    b [8, 9]
    a [4, 5, 6, 7]

To keep a device busy, call `schedule` for the next step before `update` of this one (`max_lag`):
a decode's input token is then still on the device, which is why it is kept by row above.

Who goes first is for a policy to say: see `SchedulingPolicy`. `docs/scheduler.md` tells it all.
"""

from __future__ import annotations

from tvr.core.block_manager import BlockCounts, BlockManager, PrefixHit
from tvr.core.policy import (
    FirstComeFirstServed,
    PriorityFirst,
    SchedulingPolicy,
    ShortestPromptFirst,
)
from tvr.core.prefix_cache import BlockKey
from tvr.core.schedule_output import Entry, Result, RowReset, ScheduleOutput, SequenceUpdate
from tvr.core.scheduler import Scheduler
from tvr.core.sequence import Sequence, SequenceStatus

__all__ = [
    "BlockCounts",
    "BlockKey",
    "BlockManager",
    "Entry",
    "FirstComeFirstServed",
    "PrefixHit",
    "PriorityFirst",
    "Result",
    "RowReset",
    "ScheduleOutput",
    "Scheduler",
    "SchedulingPolicy",
    "Sequence",
    "SequenceStatus",
    "SequenceUpdate",
    "ShortestPromptFirst",
]
