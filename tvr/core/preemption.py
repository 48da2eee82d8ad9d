"""Taking back the blocks of running sequences, to be recomputed later."""

from __future__ import annotations

from tvr.core.in_flight import StepRecord, StepsInFlight
from tvr.core.placement import Placement
from tvr.core.sequence import Sequence, SequenceStatus
from tvr.core.waiting_queue import WaitingQueue


class Preemption:
    """Finds blocks for sequences that must grow when none is free.

    Args:
        placement: the running sequences.
        waiting: the line that preempted ones join.
        in_flight: a sequence that a step in flight names cannot be preempted.

    Attributes:
        preempted: sequences preempted since the list was last emptied.
    """

    def __init__(
        self, placement: Placement, waiting: WaitingQueue, in_flight: StepsInFlight
    ) -> None:
        self._placement = placement
        self._waiting = waiting
        self._in_flight = in_flight
        self.preempted: list[str] = []

    def make_room(self, seq: Sequence, step: StepRecord) -> bool:
        """Get a block free for `seq` by preempting others; return False: not in this step."""
        while not self._placement.blocks.num_free:
            victim = self._victim(seq, step)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _victim(self, seq: Sequence, step: StepRecord) -> Sequence | None:
        """Return the last sequence behind `seq` in the step's order with no step in flight.

        If there is none, keep the last out of this step, so that it is one for the next.
        """
        if step.paused is not None:
            return None  # searched in vain already, and no sequence comes to rest within a step
        last = None
        for other in reversed(step.order):
            if other is seq:
                break
            if other.row < 0:
                continue  # preempted in this very step
            if self._in_flight.last_naming(other) is None:
                return other
            last = last or other
        if last is not None:
            last.fast_until = 0
            step.paused = last
        return None

    def _preempt(self, seq: Sequence) -> None:
        self._placement.remove(seq, in_flight=None)
        seq.epoch += 1
        seq.status = SequenceStatus.PREEMPTED
        self._waiting.append(seq)
        self._waiting.release_children(seq.request_id)
        self.preempted.append(seq.request_id)
        self._placement.counts["preemptions"] += 1
