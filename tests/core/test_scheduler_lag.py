"""Running one step ahead: what is in flight, what is held, what is dropped."""

from __future__ import annotations

import pytest

from support.fake_device import Loop, alone
from tvr.core import Result, Sequence
from tvr.errors import ConfigError


@pytest.mark.parametrize("lag", [0, 1])
def test_no_more_steps_are_in_flight_than_the_lag_allows(lag):
    loop = Loop(lag=lag)
    loop.add("x", [1], max_tokens=9)
    for _ in range(lag + 1):
        assert loop.schedule() is not None
    assert loop.schedule() is None
    assert loop.scheduler.num_in_flight == lag + 1


def test_steps_are_updated_once_and_in_order():
    scheduler = Loop().scheduler
    with pytest.raises(ConfigError, match=r"update of step 0: steps in flight are \[\]"):
        scheduler.update(0, [])
    loop = Loop()
    loop.add("x", [1], max_tokens=9)
    loop.schedule()
    loop.schedule()
    with pytest.raises(ConfigError, match=r"update of step 1: steps in flight are \[0, 1\]"):
        loop.scheduler.update(1, [Result("x", 0, 1)])
    with pytest.raises(ConfigError, match="update of step 1"):
        loop.scheduler.fail_step(1, "boom")
    loop.update()
    with pytest.raises(ConfigError, match="update of step 0"):
        loop.scheduler.update(0, [Result("x", 0, 1)])


def test_results_that_are_not_those_of_the_step_are_refused_and_change_nothing():
    loop = Loop()
    seqs = [loop.add(name, [1], max_tokens=9) for name in "ab"]
    loop.schedule()
    a, b = Result("a", 0, 1), Result("b", 0, 1)
    for results in ([], [a], [b, a], [a, b, b], [a, a]):
        with pytest.raises(ConfigError, match=r"it samples for \['a', 'b'\]"):
            loop.scheduler.update(0, results)
    assert [seq.num_output_tokens for seq in seqs] == [0, 0]
    assert len(loop.scheduler.update(0, [a, b])) == 2


def test_columns_that_are_not_those_of_the_step_are_refused_and_change_nothing():
    loop = Loop()
    seqs = [loop.add(name, [1], max_tokens=9) for name in "ab"]
    loop.schedule()
    with pytest.raises(ConfigError, match="steps in flight are"):
        loop.scheduler.update_columns(1, [1, 1])
    for columns in (([1],), ([1, 1, 1],), ([1, 1], [None]), ([1, 1], None, [None] * 3)):
        with pytest.raises(ConfigError, match=r"update of step 0: [123] \w+; it samples for 2"):
            loop.scheduler.update_columns(0, *columns)
    assert [seq.num_output_tokens for seq in seqs] == [0, 0]
    assert len(loop.scheduler.update_columns(0, [1, 1])) == 2


def test_columns_do_what_results_do():
    by_results, by_columns = Loop().scheduler, Loop().scheduler
    for scheduler in (by_results, by_columns):
        for name in "abcd":
            scheduler.add(Sequence(name, [1], max_tokens=9, stop_token_ids=frozenset({7})))
        scheduler.schedule()
        scheduler.schedule()
        scheduler.abort("b")
    tokens, errors, logprobs = [7, 5, None, 5], [None, None, None, "boom"], ["A", "B", "C", "D"]
    results = map(Result, "abcd", [0] * 4, tokens, errors, logprobs)
    right = by_results.update(0, list(results))
    found = by_columns.update_columns(0, tokens, errors, logprobs)
    assert [(u.sequence.request_id, *u[1:]) for u in found] == [
        ("a", 7, "stop", None, "A"),
        ("c", None, "error", "the step gave no token", None),
        ("d", None, "error", "boom", None),
    ]
    assert [(u.sequence.request_id, *u[1:]) for u in right] == [
        (u.sequence.request_id, *u[1:]) for u in found
    ]
    assert by_columns.update_columns(1, [5] * 4) == []  # all four have ended


def test_entries_say_what_was_planned_whatever_became_of_the_sequences():
    """They are made when they are read."""
    loop = Loop(lag=0, block_size=2)
    for name in "ab":
        loop.add(name, [1, 2], max_tokens=9)
    loop.step()
    output = loop.schedule()
    block = loop.sequences["a"].block_ids[1]
    loop.scheduler.abort("a")
    a, b = output.entries
    assert a == ("a", 0, 0, 2, 1, True, 1, (block,))
    assert (b.request_id, b.epoch, b.row, b.start) == ("b", 0, 1, 2)
    assert output.entries is output.entries


def test_a_decode_runs_ahead_of_the_token_it_feeds():
    loop = Loop()
    seq = loop.add("x", [1, 2, 3], max_tokens=9)
    loop.schedule()
    output = loop.schedule()
    assert (output.num_decodes, output.entries[0].start) == (1, 3)
    assert len(seq.token_ids) == 3  # the host does not know position 3 yet


def test_a_sequence_that_needs_the_host_waits_for_each_token():
    loop = Loop()
    careful = loop.add("careful", [1, 2, 3], max_tokens=5, max_lag=0)
    ahead = loop.add("ahead", [1, 2, 3], max_tokens=5)
    names = []
    while loop.scheduler.has_unfinished:
        output = loop.schedule()
        if output is not None:
            names.append("".join(sorted(entry.request_id[0] for entry in output.entries)))
            known = {
                e.request_id: len(loop.sequences[e.request_id].token_ids) for e in output.entries
            }
            for entry in output.entries:
                if entry.request_id == "careful":
                    assert entry.start + entry.num_tokens <= known["careful"]
        if output is None or len(loop.in_flight) == 2:
            loop.update()
    assert "a" in names  # the other one did run ahead meanwhile
    loop.assert_as_alone(careful, ahead)


def test_chunks_of_a_prompt_run_ahead_even_if_its_decodes_may_not():
    loop = Loop(max_num_batched_tokens=16)
    loop.add("x", [1] * 40, max_lag=0)
    assert loop.schedule() is not None
    assert loop.schedule() is not None


@pytest.mark.parametrize("end", ["abort", "finish"])
@pytest.mark.parametrize("num_ahead", [1, 2])
def test_rows_and_blocks_of_an_ended_request_are_held_while_a_step_names_them(end, num_ahead):
    loop = Loop(max_num_seqs=1, num_blocks=4, max_model_len=64)
    first = loop.add("first", [1] * 40, max_tokens=9)
    for _ in range(num_ahead):
        loop.schedule()
    assert getattr(loop.scheduler, end)("first")
    second = loop.add("second", [2] * 40, max_tokens=2)
    assert loop.scheduler.block_manager.counts() == (1, 0, 0, 3)
    for _ in range(num_ahead):
        assert loop.schedule() is None  # the only row is held
        assert loop.scheduler.block_manager.counts().held == 3
        assert loop.update() == []
    assert loop.scheduler.block_manager.counts() == (4, 0, 0, 0)
    loop.drain()
    assert first.finish_reason == {"abort": "abort", "finish": "stop"}[end]
    loop.assert_as_alone(second)


def test_what_an_aborted_request_shared_stays_with_its_other_owner():
    loop = Loop()
    parent = loop.add("x", [1] * 40, max_tokens=9)
    child = loop.add("y", [1] * 40, max_tokens=9, parent_id="x")
    while child.row < 0:
        loop.step()
    loop.schedule()
    loop.scheduler.abort("x")
    counts = loop.scheduler.block_manager.counts()
    assert (counts.used, counts.held) == (3, 1)  # only the parent's own tail is held
    loop.drain()
    loop.assert_as_alone(child)
    assert parent.finish_reason == "abort"


def test_abort_works_at_any_moment():
    """Waiting, in prefill, in decode, with 0 to 2 steps in flight, and after the end."""
    for num_moves in range(40):
        loop = Loop(max_num_batched_tokens=16, num_blocks=8, max_model_len=128)
        seqs = [loop.add(str(index), [index] * 20, max_tokens=20) for index in range(3)]
        for move in range(num_moves):
            if loop.schedule() is None or move % 3 == 2:
                loop.update()
        was_live = seqs[num_moves % 3].finish_reason is None
        assert loop.scheduler.abort(str(num_moves % 3)) is was_live
        assert not loop.scheduler.abort(str(num_moves % 3))
        assert not loop.scheduler.abort("nobody")
        loop.drain()
        loop.assert_as_alone(*(seq for seq in seqs if seq.finish_reason != "abort"))
        loop.assert_empty()


def test_results_of_an_ended_request_are_dropped():
    loop = Loop()
    seq = loop.add("x", [1, 2], max_tokens=9)
    other = loop.add("y", [3], max_tokens=9)
    loop.step()
    num_known = seq.num_output_tokens
    loop.scheduler.finish("x", "stop")
    updates = loop.update()
    assert [update.sequence for update in updates] == [other]
    assert (seq.num_output_tokens, seq.finish_reason) == (num_known, "stop")


def test_results_of_an_older_epoch_are_dropped():
    loop = Loop()
    scheduler = loop.scheduler
    seq = loop.add("x", [1, 2], max_tokens=9)
    output = loop.schedule()
    assert output.entries[0].epoch == seq.epoch
    assert scheduler.update(0, [Result("x", seq.epoch - 1, 5)]) == []
    assert seq.output_token_ids == []


def test_a_failed_step_ends_its_requests_and_publishes_nothing():
    loop = Loop(max_num_batched_tokens=32, max_num_seqs=2)
    hit = loop.add("hit", [1] * 40)
    spared = loop.add("spared", [2] * 30)
    loop.schedule()  # 32 tokens of the first only
    loop.schedule()
    updates = loop.fail("launch failed")
    assert [(u.sequence, u.token, u.finish_reason, u.error) for u in updates] == [
        (hit, None, "error", "launch failed")
    ]
    assert loop.scheduler.block_manager.counts().cached == 0
    loop.drain()
    loop.assert_as_alone(spared)
    again = loop.add("again", [1] * 40)
    loop.drain()
    assert again.num_cached_tokens == 0
    loop.assert_as_alone(again)
    loop.assert_empty()


def test_a_failed_step_ends_each_request_once():
    loop = Loop(max_num_batched_tokens=16, max_num_seqs=2, block_size=2, num_blocks=40)
    loop.add("a", [1] * 3, max_tokens=9)
    loop.add("b", [2] * 40, max_tokens=9)
    loop.schedule()
    loop.update()
    loop.schedule()  # a decode that fills a block, and a chunk
    names = [update.sequence.request_id for update in loop.fail()]
    assert sorted(names) == ["a", "b"]
    loop.drain()
    loop.assert_empty()


def test_no_sequence_in_flight_is_preempted():
    loop = Loop(num_blocks=8, max_model_len=128)
    for index in range(4):
        loop.add(str(index), [index] * 8, max_tokens=60)
    num_preempted = 0
    while loop.scheduler.has_unfinished or loop.in_flight:
        in_flight = {e.request_id for step in loop.in_flight for e in step.output.entries}
        output = loop.schedule()
        if output is not None:
            assert in_flight.isdisjoint(output.preempted)
            num_preempted += len(output.preempted)
        if output is None or len(loop.in_flight) == 2:
            loop.update()
    assert num_preempted > 0
    loop.assert_as_alone(*loop.sequences.values())


@pytest.mark.parametrize("caching", [True, False])
def test_tokens_do_not_depend_on_the_lag(caching):
    def run(lag: int) -> list[list[int]]:
        loop = Loop(
            lag=lag,
            num_blocks=12,
            max_num_batched_tokens=24,
            max_model_len=128,
            enable_prefix_caching=caching,
        )
        seqs = [
            loop.add(
                str(i),
                [i % 3] * (5 + 7 * i % 40),
                max_tokens=30,
                stop_token_ids=frozenset({i % 16}),
            )
            for i in range(24)
        ]
        loop.drain()
        return [seq.output_token_ids for seq in seqs]

    assert run(0) == run(1)


def test_a_sequence_kept_out_for_another_goes_on_when_that_one_is_gone():
    """With all blocks in use and all in flight, nothing can run: no step, but also no deadlock."""
    loop = Loop(num_blocks=4, max_model_len=64)
    loop.add("first", [1] * 14, max_tokens=50)
    second = loop.add("second", [2] * 14, max_tokens=50)
    while loop.schedule() is not None:
        if len(loop.in_flight) == 2:
            loop.update()
    assert loop.in_flight
    assert loop.scheduler.abort("first")
    while loop.in_flight:
        loop.update()
    assert loop.schedule() is not None
    loop.drain()
    loop.assert_as_alone(second)


def test_alone_knows_its_limits():
    assert len(alone([1], max_tokens=3, max_model_len=99)[0]) == 3
    assert len(alone([1] * 97, max_tokens=30, max_model_len=99)[0]) == 2
