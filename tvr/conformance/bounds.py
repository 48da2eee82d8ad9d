"""How large a step may be: the bounds that workspaces are sized by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvr.contract import Bounds

if TYPE_CHECKING:
    from tvr.contract import StepMeta

#: Room for small cases: a kernel interpreter need not clear a gigabyte for four short sequences.
SMALL = Bounds(max_num_seqs=8, max_num_tokens=256, max_seq_len=256, max_q_len=256)

#: Room for every named case: the engine's largest step.
LARGE = Bounds(max_num_seqs=256, max_num_tokens=16384, max_seq_len=131072, max_q_len=8192)


def exact(step: StepMeta) -> Bounds:
    """Return the smallest bounds that hold `step`."""
    return Bounds(
        max_num_seqs=max(1, step.num_seqs),
        max_num_tokens=max(1, step.num_tokens),
        max_seq_len=max(1, step.max_seq_len),
        max_q_len=max(1, step.max_q_len),
    )


def covers(bounds: Bounds, other: Bounds) -> bool:
    """Return whether no bound of `other` is above that of `bounds`."""
    return (
        bounds.max_num_seqs >= other.max_num_seqs
        and bounds.max_num_tokens >= other.max_num_tokens
        and bounds.max_seq_len >= other.max_seq_len
        and bounds.max_q_len >= other.max_q_len
    )


def holding(step: StepMeta) -> Bounds:
    """Return `SMALL` if it holds `step`, else `LARGE`; for a step beyond both its own bounds."""
    needed = exact(step)
    return next((bounds for bounds in (SMALL, LARGE) if covers(bounds, needed)), needed)
