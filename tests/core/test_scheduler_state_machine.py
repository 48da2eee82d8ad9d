"""Any interleaving of add, schedule, schedule ahead, update, failed step, abort and finish.

Under any policy, too, and under those that answer nonsense.
"""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from support.fake_device import VOCAB, Loop, alone
from support.policies import Contrary, RandomPolicy
from tvr.core import (
    FirstComeFirstServed,
    PriorityFirst,
    ScheduleOutput,
    Sequence,
    SequenceStatus,
    ShortestPromptFirst,
)
from tvr.errors import PolicyError, RequestError

# Three prompts that share prefixes of 0 to 4 blocks with each other.
STEMS = ([1] * 17, [1] * 8 + [2] * 9, [3, 4] * 8)

POLICIES = st.one_of(
    st.sampled_from([FirstComeFirstServed(), ShortestPromptFirst(), PriorityFirst(), Contrary()]),
    st.builds(RandomPolicy, st.integers(0, 1000), st.sampled_from([0.0, 0.0, 0.02, 0.2])),
)


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a small, crowded scheduler; the device checks what every step reads."""

    @initialize(
        block_size=st.sampled_from([2, 4]),
        num_blocks=st.integers(8, 14),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 12),
        caching=st.booleans(),
        lag=st.sampled_from([0, 1, 1]),
        max_bypass=st.integers(0, 3),
        policy=POLICIES,
    )
    def start(
        self, block_size, num_blocks, max_num_seqs, extra_budget, caching, lag, max_bypass, policy
    ) -> None:
        self.loop = Loop(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_model_len=32,
            enable_prefix_caching=caching,
            lag=lag,
            max_bypass=max_bypass,
            policy=policy,
        )
        self.max_bypass = max_bypass
        self.scheduler = self.loop.scheduler
        self.started: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.num_told: Counter[int] = Counter()
        self.num_passed: Counter[str] = Counter()

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(1, 17),
        tail=st.lists(st.integers(0, 2), max_size=3),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 4),
        stops=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
        seq_lag=st.sampled_from([0, 1, 1]),
        salt=st.sampled_from([None, None, None, "salt"]),
        priority=st.integers(-1, 1),
    )
    def add(self, stem, cut, tail, max_tokens, min_tokens, stops, seq_lag, salt, priority) -> None:
        self._add(
            stem[:cut] + tail,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            max_lag=seq_lag,
            cache_salt=salt,
            priority=priority,
        )

    @rule(pick=st.integers(0, 100), num=st.integers(1, 3), max_tokens=st.integers(1, 9))
    def add_children(self, pick, num, max_tokens) -> None:
        """Children of a live sequence, or of one long gone."""
        if self.started:
            parent = self.started[-1 - pick % min(len(self.started), 6)]
            prompt = parent.token_ids[: parent.num_prompt_tokens]
            for _ in range(num):
                self._add(prompt, max_tokens=max_tokens, parent_id=parent.request_id)

    def _add(self, prompt: list[int], **options: object) -> None:
        try:
            seq = self.loop.add(f"r{len(self.started)}", prompt, **options)
        except RequestError as error:
            assert "can never fit" in str(error)  # noqa: PT017
        else:
            self.started.append(seq)

    @rule(policy=POLICIES, wait=st.integers(0, 4))
    def change_policy(self, policy, wait) -> None:
        if not wait:
            self.scheduler.policy = policy

    def _plan(self) -> ScheduleOutput | None:
        """Schedule; a policy that fails has no say from then on, and nothing else has changed."""
        policy, before = self.scheduler.policy, self._books()
        troubles = getattr(policy, "num_troubles", 0)
        try:
            output = self.loop.schedule()
        except PolicyError:
            assert policy.num_troubles == troubles + 1
            assert self._books() == before
            assert type(self.scheduler.policy) is FirstComeFirstServed
            return self.loop.schedule()
        assert getattr(policy, "num_troubles", 0) == troubles
        return output

    def _books(self) -> object:
        places = [
            (s.row, s.epoch, s.status, s.num_scheduled, tuple(s.block_ids)) for s in self.started
        ]
        scheduler = self.scheduler
        counts = scheduler.block_manager.counts()
        return places, counts, scheduler.num_waiting, scheduler.num_running, scheduler.num_in_flight

    @rule()
    def schedule(self) -> None:
        oldest = next((seq for seq in self.started if seq.finish_reason is None), None)
        was_running = oldest is not None and oldest.row >= 0
        output = self._plan()
        if was_running:
            assert oldest.status is SequenceStatus.RUNNING, "the oldest was preempted"
        elif output is not None:
            names = [reset.request_id for reset in output.row_resets]
            if oldest.request_id in names:
                names = names[: names.index(oldest.request_id)]
            self.num_passed[oldest.request_id] += len(names)
            assert self.num_passed[oldest.request_id] <= self.max_bypass
        if output is None:
            busy = self.scheduler.num_in_flight or not self.scheduler.has_unfinished
            assert busy, "unfinished, nothing in flight, no work"
            return
        entries, num_decodes = output.entries, output.num_decodes
        assert entries
        assert output.num_tokens == sum(entry.num_tokens for entry in entries)
        assert output.num_tokens <= self.scheduler.max_num_batched_tokens
        assert len({entry.row for entry in entries}) == len(entries)
        assert all(entry.num_tokens == 1 and entry.samples for entry in entries[:num_decodes])
        resets = {(reset.row, reset.request_id) for reset in output.row_resets}
        assert resets <= {(entry.row, entry.request_id) for entry in entries[num_decodes:]}
        for index, entry in enumerate(entries):
            seq = self.loop.sequences[entry.request_id]
            assert entry.logit_rows == int(entry.samples)
            assert entry.start + entry.num_tokens < seq.max_length
            if index >= num_decodes:
                end = entry.start + entry.num_tokens
                assert end <= len(seq.token_ids)
                assert entry.samples == (end == len(seq.token_ids))

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def update(self) -> None:
        for update in self.loop.update():
            seq = update.sequence
            assert update.token == seq.token_ids[-1]
            assert update.finish_reason == seq.finish_reason
            self.num_told[id(seq)] += 1

    @precondition(lambda self: self.loop.in_flight)
    @rule(wait=st.integers(0, 4))
    def fail(self, wait) -> None:
        """A failed step; rare, as it ends so much."""
        if wait:
            return
        live = [seq for seq in self.loop.in_flight[0].sequences if seq.finish_reason is None]
        updates = self.loop.fail("boom")
        assert {update.sequence for update in updates} == set(live)
        assert all(seq.finish_reason == "error" for seq in live)

    @rule(pick=st.integers(0, 100), with_abort=st.booleans())
    def end(self, pick, with_abort) -> None:
        live = [seq for seq in self.started if seq.finish_reason is None]
        if live and pick % 3 == 0:
            seq = live[pick % len(live)]
            if with_abort:
                assert self.scheduler.abort(seq.request_id)
            else:
                assert self.scheduler.finish(seq.request_id, "stop")
            assert not self.scheduler.abort(seq.request_id)
            self.ended.append(seq)

    @invariant()
    def blocks_add_up(self) -> None:
        blocks = self.scheduler.block_manager
        counts = blocks.counts()
        assert sum(counts) == blocks.num_blocks
        assert counts.free + counts.cached == blocks.num_free
        owners = Counter(block for seq in self._running() for block in seq.block_ids)
        for block in range(blocks.num_blocks):
            assert blocks.ref_count(block) == owners[block]
        for seq in self.started:
            if seq.row < 0:
                assert not seq.block_ids

    @invariant()
    def what_is_in_flight_is_held(self) -> None:
        blocks = self.scheduler.block_manager
        tables = {row: list(table) for row, table in self.loop.device.block_tables.items()}
        named: dict[int, Sequence] = {}
        for step in self.loop.in_flight:
            for reset in step.output.row_resets:
                tables[reset.row] = []
            for entry, seq in zip(step.output.entries, step.sequences, strict=True):
                tables[entry.row] += entry.new_block_ids
                assert not any(map(blocks.is_unused, tables[entry.row]))
                named[entry.row] = seq
        for seq in self._running():
            assert named.get(seq.row, seq) is seq, "a row in flight has a second owner"

    @invariant()
    def rows_are_distinct(self) -> None:
        rows = [seq.row for seq in self._running()]
        assert len(set(rows)) == len(rows) == self.scheduler.num_running
        assert len(rows) <= self.scheduler.max_num_seqs
        live = sum(seq.finish_reason is None for seq in self.started)
        assert self.scheduler.num_waiting == live - len(rows)

    def _running(self) -> list[Sequence]:
        return [seq for seq in self.started if seq.row >= 0]

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self.loop.drain(max_steps=80 * (len(self.started) + 1))
        except PolicyError:
            self.loop.drain(max_steps=80 * (len(self.started) + 1))
        self.loop.assert_empty()
        for seq in self.started:
            tokens, reason = alone(
                seq.token_ids[: seq.num_prompt_tokens],
                max_tokens=seq.max_tokens,
                max_model_len=self.scheduler.max_model_len,
                min_tokens=seq.min_tokens,
                stop_token_ids=seq.stop_token_ids,
            )
            if seq in self.ended or seq.finish_reason == "error":
                assert seq.output_token_ids == tokens[: seq.num_output_tokens]
            else:
                assert (seq.output_token_ids, seq.finish_reason) == (tokens, reason)


def run_machine(random_seed, *, num_examples, num_rules, phases=tuple(Phase)) -> None:
    """Run it; also by hand, with more examples and other seeds."""
    config = settings(
        max_examples=num_examples,
        stateful_step_count=num_rules,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        phases=phases,
    )
    run_state_machine_as_test(seed(random_seed)(SchedulerMachine), settings=config)


def test_every_interleaving_keeps_books_blocks_and_tokens_right():
    run_machine(20240, num_examples=500, num_rules=60)
