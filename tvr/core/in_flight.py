"""Steps that were scheduled and have not been updated, and what must be known of them then."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import repeat
from operator import attrgetter

from tvr.core.schedule_output import Entry, Result, RowReset
from tvr.core.sequence import Sequence
from tvr.errors import ConfigError

#: Epoch, token, error and logprobs of each entry that samples.
Columns = tuple[Iterable[int], Iterable[int | None], Iterable[str | None], Iterable[object]]

_request_id = attrgetter("request_id")


class StepRecord:
    """A step in flight.

    Attributes:
        step_id: its number.
        sampling: the sequences it samples for, in the order of the entries.
        epochs: of each of these, when the step was planned.
        writes: (sequence, epoch, end) of each prefill chunk and of each decode that fills a
            block: positions below `end` are in the cache once the step is done.
        order: the sequences running when it was planned; each may take blocks from those behind.
        chunks, row_resets: see `ScheduleOutput`.
        held: row and blocks of each sequence that ended while this step named it.
        paused: a sequence kept out of this step to become a preemption victim.
    """

    __slots__ = (
        "chunks",
        "epochs",
        "held",
        "order",
        "paused",
        "row_resets",
        "sampling",
        "step_id",
        "writes",
    )

    def __init__(self, step_id: int, order: list[Sequence]) -> None:
        self.step_id = step_id
        self.order = order
        self.chunks: list[Entry] = []
        self.row_resets: list[RowReset] = []
        self.sampling: list[Sequence] = []
        self.epochs: list[int] = []
        self.writes: list[tuple[Sequence, int, int]] = []
        self.held: list[tuple[int, list[int]]] = []
        self.paused: Sequence | None = None

    def sequences(self) -> list[Sequence]:
        """Every sequence of the step, once."""
        return list(dict.fromkeys([*self.sampling, *(seq for seq, _, _ in self.writes)]))

    def results_by_column(self, results: Seq[Result]) -> Columns:
        """Return the columns of results for what it samples, in order.

        Raises:
            ConfigError: they are other results.
        """
        given, sampled = list(map(_request_id, results)), list(map(_request_id, self.sampling))
        if given != sampled:
            raise ConfigError(
                f"update of step {self.step_id}: results for {given}; it samples for {sampled}, in"
                " this order"
            )
        _, epochs, tokens, errors, logprobs = zip(*results, strict=True) if results else [()] * 5
        return epochs, tokens, errors, logprobs

    def columns(
        self,
        tokens: Seq[int | None],
        errors: Seq[str | None] | None,
        logprobs: Seq[object] | None,
    ) -> Columns:
        """Return the columns of results that are of its own epochs; None: every one is None.

        Raises:
            ConfigError: a column is shorter or longer than what it samples.
        """
        num = len(self.sampling)
        for name, column in (("tokens", tokens), ("errors", errors), ("logprobs", logprobs)):
            if column is not None and len(column) != num:
                raise ConfigError(
                    f"update of step {self.step_id}: {len(column)} {name}; it samples for {num}"
                    " sequences, and wants one of each, in the order of its entries"
                )
        return self.epochs, tokens, errors or repeat(None), logprobs or repeat(None)


class StepsInFlight:
    """The steps in flight, oldest first; numbers new ones.

    Attributes:
        last_updated: number of the newest step that is over.
    """

    def __init__(self) -> None:
        self._steps: deque[StepRecord] = deque()
        self._next_id = 0
        self.last_updated = -1

    def __len__(self) -> int:
        return len(self._steps)

    def new(self, order: list[Sequence]) -> StepRecord:
        """Return a record for the next step; it counts only once it is `push`ed."""
        return StepRecord(self._next_id, order)

    def push(self, step: StepRecord) -> None:
        """Put the next step in flight."""
        self._steps.append(step)
        self._next_id += 1

    def oldest(self, step_id: int) -> StepRecord:
        """Return the oldest step.

        Raises:
            ConfigError: it is not `step_id`.
        """
        if not self._steps or self._steps[0].step_id != step_id:
            raise ConfigError(
                f"update of step {step_id}: steps in flight are"
                f" {[step.step_id for step in self._steps]}; update each once, in order"
            )
        return self._steps[0]

    def pop(self) -> None:
        """Count the oldest step as over."""
        self.last_updated = self._steps.popleft().step_id

    def last_naming(self, seq: Sequence) -> StepRecord | None:
        """Return the newest step in flight that names a running sequence, if any does."""
        if seq.last_step <= self.last_updated:
            return None
        return self._steps[seq.last_step - self._steps[0].step_id]
