"""Continuous batching: which tokens of which sequences the next step computes.

The scheduler decides and keeps the books; it runs nothing. It may run one step ahead of the
results: `schedule` for step n + 1 while step n is on the device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Seq

from tvr.core.block_manager import BlockManager
from tvr.core.in_flight import Columns, StepRecord, StepsInFlight
from tvr.core.placement import Placement
from tvr.core.policy import FirstComeFirstServed, SchedulingPolicy
from tvr.core.policy_guard import PolicyGuard
from tvr.core.preemption import Preemption
from tvr.core.schedule_output import (
    Decodes,
    Entry,
    Result,
    RowReset,
    ScheduleOutput,
    SequenceUpdate,
)
from tvr.core.sequence import Sequence, SequenceStatus
from tvr.core.waiting_queue import WaitingQueue
from tvr.errors import ConfigError, RequestError

_NO_BLOCK = -1


class Scheduler:
    """Plans steps under a token budget: running decodes, running prefills, then new sequences.

    A new sequence takes the blocks of its whole prefill at once, and starts only when they and
    some room to grow are free. Should the blocks run out all the same, a running sequence with no
    step in flight is preempted: it loses its blocks and is recomputed later.

    Who goes first, who is preempted and how a step is shared is the policy's to say. Whatever it
    says, everybody's turn comes: the oldest live sequence is never preempted, is served before
    all others while it runs, and is passed over at most `max_bypass` times while it waits.

    Whenever something is unfinished and nothing in flight, `schedule` returns work.

    Args:
        num_blocks, block_size: the KV pool.
        max_num_seqs: rows of the device tables; most sequences running at a time.
        max_num_batched_tokens: most tokens in a step, at least `max_num_seqs`.
        max_model_len: most tokens of a sequence, prompt included.
        enable_prefix_caching: reuse the blocks of equal prefixes.
        max_lag: steps that may be scheduled ahead of `update`: 0 or 1.
        max_bypass: how often a waiting sequence may be passed over while it is first in line.
        policy: None: first come, first served.
        counts: what to count in; None: a new one.

    Attributes:
        counts: so far: "preemptions", and of new sequences, if prefixes are cached,
            "queried_tokens" of their prompts and "cached_tokens" among them.

    Raises:
        ConfigError: an argument out of its range.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        max_lag: int = 1,
        max_bypass: int = 16,
        policy: SchedulingPolicy | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        for name, value, least in (
            ("max_num_seqs", max_num_seqs, 1),
            ("max_model_len", max_model_len, 2),
            ("max_bypass", max_bypass, 0),
        ):
            if value < least:
                raise ConfigError(f"{name} = {value}: must be at least {least}")
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens = {max_num_batched_tokens}: must be at least max_num_seqs"
                f" = {max_num_seqs}, a token for every running sequence; raise it or lower that"
            )
        if max_lag not in (0, 1):
            raise ConfigError(f"max_lag = {max_lag}: must be 0 or 1")
        self.block_manager = BlockManager(
            num_blocks, block_size, enable_prefix_caching=enable_prefix_caching
        )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_lag = max_lag
        self._live: dict[str, Sequence] = {}
        self._waiting = WaitingQueue(max_bypass)
        self.counts: Counter[str] = Counter() if counts is None else counts
        self._placement = Placement(self.block_manager, max_num_seqs, self.counts)
        self._guard = PolicyGuard(
            FirstComeFirstServed() if policy is None else policy,
            self._waiting,
            self._placement,
            max_num_batched_tokens,
        )
        self._in_flight = StepsInFlight()
        self._preemption = Preemption(self._placement, self._waiting, self._in_flight)
        self._num_added = 0

    @property
    def policy(self) -> SchedulingPolicy:
        """The policy in force; another one may be set at any time between two calls."""
        return self._guard.policy

    @policy.setter
    def policy(self, policy: SchedulingPolicy) -> None:
        self._guard.policy = policy

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a row and blocks, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that have a row and blocks."""
        return len(self._placement.running)

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and not yet updated."""
        return len(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self._live)

    def add(self, seq: Sequence) -> None:
        """Take in a sequence.

        Raises:
            RequestError: its id is live, it has been run before, or it can never fit.
        """
        if seq.request_id in self._live:
            raise RequestError(
                f"request {seq.request_id!r}: a live request has that id; take another, or wait"
                " for that one to end"
            )
        seq.set_limits(
            max_model_len=self.max_model_len,
            num_blocks=self.block_manager.num_blocks,
            block_size=self.block_manager.block_size,
        )
        seq.arrival = self._num_added
        self._num_added += 1
        parent = self._live_parent(seq)
        self._live[seq.request_id] = seq
        if parent is None or parent.is_prefilled or parent.status is SequenceStatus.PREEMPTED:
            self._waiting.append(seq)
        else:
            self._waiting.append_child(parent.request_id, seq)

    def abort(self, request_id: str) -> bool:
        """End a sequence at once; return False if no live one has that id.

        What steps in flight still name, its row and blocks, is given back at their update; their
        results for it are dropped.
        """
        return self.finish(request_id, "abort")

    def finish(self, request_id: str, reason: str = "stop") -> bool:
        """End a sequence for a reason the host found, such as a stop string; like `abort`."""
        seq = self._live.get(request_id)
        if seq is None:
            return False
        self._end(seq, reason)
        return True

    def schedule(self) -> ScheduleOutput | None:
        """Plan the next step; None if nothing can run before the next `update`, or at all.

        Raises:
            PolicyError: the policy failed. Nothing has changed, but that from the next call on
                all go first come, first served.
        """
        if len(self._in_flight) > self.max_lag:
            return None
        order, max_prefill = self._guard.plan()
        step = self._in_flight.new(order)
        step_id = step.step_id
        prefilling: list[Sequence] = []
        decoding: list[Sequence] = []
        starts: list[int] = []
        new_blocks: dict[int, int] = {}
        for seq in order:  # this loop is most of what the host does here
            start = seq.num_scheduled
            if start >= seq.fast_until:
                if start < seq.num_prefill:
                    prefilling.append(seq)
                    continue
                block = self._grow(seq, step)
                if block is None:
                    continue
                if block != _NO_BLOCK:
                    new_blocks[len(starts)] = block
            seq.num_scheduled = start + 1
            seq.last_step = step_id
            decoding.append(seq)
            starts.append(start)
        epochs, rows = [seq.epoch for seq in decoding], [seq.row for seq in decoding]
        step.sampling += decoding
        step.epochs += epochs
        num_tokens = len(decoding)
        if prefilling or self._waiting:
            budget = min(self.max_num_batched_tokens - num_tokens, max_prefill)
            num_tokens += self._prefill_all(step, prefilling, budget)
        if not num_tokens:
            return None
        self._in_flight.push(step)
        preempted, self._preemption.preempted = self._preemption.preempted, []
        decodes = Decodes(decoding, epochs, rows, starts, new_blocks)
        return ScheduleOutput(step_id, decodes, step.chunks, num_tokens, preempted, step.row_resets)

    def update(self, step_id: int, results: Seq[Result]) -> list[SequenceUpdate]:
        """Take in the results of the oldest step in flight.

        Args:
            step_id: that step.
            results: one for each entry that samples, in the order of the entries.

        Returns:
            What happened to each sequence still live, in the same order. Results of an older
            epoch or of an ended sequence are dropped.

        Raises:
            ConfigError: not the oldest step, or not its results; nothing has changed then.
        """
        step = self._in_flight.oldest(step_id)
        return self._update(step, step.results_by_column(results))

    def update_columns(
        self,
        step_id: int,
        tokens: Seq[int | None],
        errors: Seq[str | None] | None = None,
        logprobs: Seq[object] | None = None,
    ) -> list[SequenceUpdate]:
        """As `update`, with less work for the host: place i is of the i-th entry that samples.

        Args:
            step_id: that step.
            tokens, errors, logprobs: as in `Result`; None: every one is None.

        Raises:
            ConfigError: not the oldest step, or too few or too many; nothing has changed then.
        """
        step = self._in_flight.oldest(step_id)
        return self._update(step, step.columns(tokens, errors, logprobs))

    def _update(self, step: StepRecord, columns: Columns) -> list[SequenceUpdate]:
        self._in_flight.pop()
        updates: list[SequenceUpdate] = []
        ended: list[tuple[Sequence, str]] = []
        new_tuple = tuple.__new__  # half the time of SequenceUpdate(...), needed for every token
        for seq, epoch, token, error, logprob in zip(step.sampling, *columns, strict=False):
            if epoch != seq.epoch:
                continue
            if token is None or error is not None:
                updates.append(self._fail(seq, error or "the step gave no token"))
                continue
            known = seq.token_ids
            known.append(token)
            reason = None
            if len(known) >= seq.max_length or token in seq.stop_token_ids:
                reason = seq.ends_with(token)
                if reason is not None:
                    ended.append((seq, reason))
            updates.append(new_tuple(SequenceUpdate, (seq, token, reason, None, logprob)))
        # A sequence that failed is left out by its epoch; one that ended well still counts.
        for seq, epoch, end in step.writes:
            if epoch == seq.epoch:
                self._placement.written(seq, end)
                if end == seq.num_prefill:
                    self._waiting.release_children(seq.request_id)
        for seq, reason in ended:
            self._end(seq, reason)
        self._placement.release_held(step)
        return updates

    def fail_step(self, step_id: int, error: str) -> list[SequenceUpdate]:
        """End, with `error`, every live sequence of the oldest step in flight; it wrote nothing.

        Raises:
            ConfigError: not the oldest step in flight.
        """
        step = self._in_flight.oldest(step_id)
        self._in_flight.pop()
        live = [seq for seq in step.sequences() if seq.finish_reason is None]
        updates = [self._fail(seq, error) for seq in live]
        self._placement.release_held(step)
        return updates

    def _grow(self, seq: Sequence, step: StepRecord) -> int | None:
        """Decide on a decode at `num_scheduled`; return its new block or that it takes none.

        None: not in this step.
        """
        start = seq.num_scheduled
        if seq.status is not SequenceStatus.RUNNING or seq is step.paused:
            return None  # preempted, or about to be, for a sequence before it in this very step
        if start >= seq.max_length - 1:
            return None  # ends by length when its last token arrives
        if start >= len(seq.token_ids) and seq.max_lag == 0:
            return None  # the host has yet to see the token to feed
        block = _NO_BLOCK
        size = self.block_manager.block_size
        if start == len(seq.block_ids) * size:
            if not self._preemption.make_room(seq, step):
                return None
            block = self._placement.grow(seq)
        if (start + 1) % size == 0:
            step.writes.append((seq, seq.epoch, start + 1))
        self._set_fast_until(seq)
        return block

    def _set_fast_until(self, seq: Sequence) -> None:
        """Let decodes pass up to the one that fills the last block, or ends the sequence."""
        if seq.max_lag > 0:
            room = len(seq.block_ids) * self.block_manager.block_size
            seq.fast_until = min(room, seq.max_length) - 1

    def _prefill(
        self, seq: Sequence, step: StepRecord, budget: int, new_block_ids: tuple[int, ...]
    ) -> int:
        """Add the next chunk of a prefill; return its length."""
        start = seq.num_scheduled
        num_tokens = min(budget, seq.num_prefill - start)
        end = start + num_tokens
        samples = end == seq.num_prefill
        seq.num_scheduled = end
        seq.last_step = step.step_id
        step.writes.append((seq, seq.epoch, end))
        if samples:
            step.sampling.append(seq)
            step.epochs.append(seq.epoch)
            self._set_fast_until(seq)
        row, rows = seq.row, num_tokens if seq.prompt_logits else int(samples)
        step.chunks.append(
            Entry(seq.request_id, seq.epoch, row, start, num_tokens, samples, rows, new_block_ids)
        )
        return num_tokens

    def _prefill_all(self, step: StepRecord, prefilling: list[Sequence], budget: int) -> int:
        """Go on with prefills and start waiting sequences, by rank; return the tokens spent."""
        left = budget
        oldest = step.order[0] if step.order else None
        prefilling.sort(key=lambda seq: (seq is not oldest, seq.rank))
        running = deque(seq for seq in prefilling if seq is not step.paused)
        candidates = self._waiting.candidates()
        while left:
            new = next(candidates, None) if self._placement.free_rows else None
            while left and running:
                seq = running[0]
                if new is not None and seq is not oldest and new.rank < seq.rank:
                    break
                left -= self._prefill(running.popleft(), step, left, ())
            if new is None or not left:
                break
            if self._placement.place(new, self._live_parent(new)):
                self._waiting.take(new)
                step.row_resets.append(RowReset(new.row, new.request_id))
                left -= self._prefill(new, step, left, tuple(new.block_ids))
        return budget - left

    def _live_parent(self, seq: Sequence) -> Sequence | None:
        return None if seq.parent_id is None else self._live.get(seq.parent_id)

    def _fail(self, seq: Sequence, error: str) -> SequenceUpdate:
        self._end(seq, "error")
        return SequenceUpdate(seq, None, "error", error, None)

    def _end(self, seq: Sequence, reason: str) -> None:
        """End a live sequence; its row and blocks come back once no step in flight names them."""
        del self._live[seq.request_id]
        if seq.status is SequenceStatus.RUNNING:
            self._placement.remove(seq, self._in_flight.last_naming(seq))
        else:
            self._waiting.remove(seq)
        seq.epoch += 1
        seq.finish_reason = reason
        seq.status = SequenceStatus.FINISHED
        self._waiting.release_children(seq.request_id)
