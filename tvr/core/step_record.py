"""What the scheduler remembers of a step until its update."""

from __future__ import annotations

from tvr.core.sequence import Sequence


class StepRecord:
    """A step in flight.

    Attributes:
        step_id: its number.
        sampling: the sequences it samples for, in the order of the entries.
        writes: (sequence, epoch, end) of each prefill chunk and of each decode that fills a
            block: positions below `end` are in the cache once the step is done.
        held: row and blocks of each sequence that ended while this step named it.
        paused: a sequence kept out of this step to become a preemption victim.
    """

    __slots__ = ("held", "paused", "sampling", "step_id", "writes")

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.sampling: list[Sequence] = []
        self.writes: list[tuple[Sequence, int, int]] = []
        self.held: list[tuple[int, list[int]]] = []
        self.paused: Sequence | None = None

    def sequences(self) -> list[Sequence]:
        """Every sequence of the step, once."""
        return list(dict.fromkeys([*self.sampling, *(seq for seq, _, _ in self.writes)]))
