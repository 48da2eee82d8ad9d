"""Admission, prefix sharing, preemption, fairness: who gets the blocks."""

from __future__ import annotations

import random

import pytest

from support.fake_device import Loop
from support.policies import Contrary, RandomPolicy
from tvr.core import FirstComeFirstServed, SequenceStatus

both_lags = pytest.mark.parametrize("lag", [0, 1])


@both_lags
@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 48])
def test_a_hit_gives_the_tokens_of_a_miss(lag, length):
    loop = Loop(lag=lag)
    prompt = [token % 7 for token in range(length)]
    cold = loop.add("cold", prompt, max_tokens=20)
    loop.drain()
    warm = loop.add("warm", prompt, max_tokens=20)
    loop.drain()
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (length - 1) // 16 * 16  # a full hit computes a token
    loop.assert_as_alone(cold, warm)


def test_partly_filled_tail_block_is_never_shared():
    loop = Loop()
    stem = [3] * 20
    first = loop.add("first", [*stem, 4], max_tokens=8)
    loop.step()
    second = loop.add("second", [*stem, 5], max_tokens=8)
    loop.step()
    assert second.num_cached_tokens == 16
    assert set(first.block_ids) & set(second.block_ids) == {first.block_ids[0]}
    loop.drain()
    loop.assert_as_alone(first, second)


@both_lags
def test_a_block_is_found_only_after_the_update_of_the_step_that_wrote_it(lag):
    loop = Loop(lag=lag, max_num_batched_tokens=32)
    prompt = [6] * 64
    first, second = loop.add("first", prompt), loop.add("second", prompt)
    loop.drain()
    # Both chunks of the first are in flight or done before the second starts; what it was
    # given had been written by then, which the device checks slot by slot.
    assert second.num_cached_tokens in {0, 32, 48}
    loop.assert_as_alone(first, second)


def test_a_step_in_flight_publishes_nothing():
    loop = Loop(max_num_batched_tokens=32)
    prompt = [6] * 33
    loop.add("first", prompt)
    loop.schedule()
    second = loop.add("second", prompt)
    loop.schedule()
    assert second.num_cached_tokens == 0
    third = loop.add("third", prompt)
    loop.update()
    loop.schedule()
    assert third.num_cached_tokens == 32


@both_lags
def test_equal_prompts_in_one_step_leave_no_dangling_block(lag):
    loop = Loop(lag=lag, max_num_batched_tokens=8 * 48)
    seqs = [loop.add(str(index), [2] * 48, max_tokens=5) for index in range(8)]
    loop.drain()
    loop.assert_as_alone(*seqs)
    loop.assert_empty()
    # One copy of the prompt stays findable, and nothing else.
    assert loop.scheduler.block_manager.counts().cached == 3


def test_generated_blocks_are_found_by_the_next_turn():
    loop = Loop()
    first = loop.add("first", [1] * 20, max_tokens=30)
    loop.drain()
    second = loop.add("second", [*first.token_ids, 9])
    loop.drain()
    assert second.num_cached_tokens == 48
    loop.assert_as_alone(second)


def test_cache_salts_keep_requests_apart():
    loop = Loop()
    salts = (None, "a", "b", "a")
    seqs = []
    for index, salt in enumerate(salts):
        seqs.append(loop.add(str(index), [1] * 33, cache_salt=salt))
        loop.drain()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0, 0, 32]


def test_a_shared_prefix_survives_pressure_while_one_reader_runs():
    loop = Loop(lag=0, num_blocks=8, max_model_len=128)
    reader = loop.add("reader", [1] * 33, max_tokens=40)
    loop.step()
    other = loop.add("other", [1] * 33, max_tokens=1)
    loop.step()
    assert (other.num_cached_tokens, other.finish_reason) == (32, "length")
    shared = reader.block_ids[:2]
    for index in range(20):  # together they take and evict all they can get
        loop.add(f"evict{index}", [index + 2] * 40, max_tokens=1)
        loop.step()
        assert reader.block_ids[:2] == shared
        assert all(loop.scheduler.block_manager.ref_count(block) == 1 for block in shared)
    loop.drain()
    loop.assert_as_alone(*loop.sequences.values())
    loop.assert_empty()


def test_a_request_that_does_not_fit_yet_takes_no_reference():
    loop = Loop(lag=0, num_blocks=7, max_model_len=128)
    reader = loop.add("reader", [1] * 33, max_tokens=60)
    loop.step()
    blocks = loop.scheduler.block_manager
    before = [blocks.ref_count(block) for block in range(7)]
    waiting = loop.add("waiting", [1] * 32 + [2] * 60, max_tokens=2)
    loop.schedule()
    assert waiting.status is SequenceStatus.WAITING
    assert [blocks.ref_count(block) for block in range(7)] == before
    loop.drain()
    loop.assert_as_alone(reader, waiting)


@both_lags
def test_a_preempted_sequence_ends_as_if_alone(lag):
    loop = Loop(lag=lag, num_blocks=8, max_model_len=128)
    seqs = [loop.add(str(index), [index] * 8, max_tokens=60) for index in range(4)]
    loop.drain()
    assert sum(len(output.preempted) for output in loop.outputs) > 0
    loop.assert_as_alone(*seqs)
    loop.assert_empty()


@both_lags
def test_the_newest_sequence_is_preempted(lag):
    loop = Loop(lag=lag, num_blocks=8, max_model_len=128)
    for index in range(4):
        loop.add(str(index), [index] * 8, max_tokens=60)
    while not any(output.preempted for output in loop.outputs):
        loop.step()
    assert [output.preempted for output in loop.outputs if output.preempted] == [["3"]]
    assert loop.sequences["3"].epoch == 1
    assert loop.sequences["3"].status is SequenceStatus.PREEMPTED
    assert loop.sequences["3"].block_ids == []


@both_lags
def test_a_resumed_sequence_computes_all_but_what_it_finds_cached(lag):
    """The tokens to compute are counted after the cache hit is known."""
    loop = Loop(lag=lag, num_blocks=8, max_model_len=128)
    for index in range(4):
        loop.add(str(index), [index] * 8, max_tokens=60)
    known: dict[str, int] = {}
    while loop.scheduler.has_unfinished:
        loop.step()
        for output in loop.outputs:
            for reset in output.row_resets:
                seq = loop.sequences[reset.request_id]
                (entry,) = [e for e in output.entries if e.request_id == reset.request_id]
                assert len(entry.new_block_ids) * 16 >= entry.start + entry.num_tokens
                if entry.epoch:
                    known[reset.request_id] = entry.start
                    assert entry.start % 16 == 0
                    assert entry.start + entry.num_tokens <= len(seq.token_ids)
        loop.outputs.clear()
    assert known
    # What it finds of its own is no prefix hit of the request.
    assert all(seq.num_cached_tokens == 0 for seq in loop.sequences.values())
    assert max(known.values()) >= 16  # some resumed sequence did find blocks of its own
    loop.assert_as_alone(*loop.sequences.values())


@both_lags
def test_hundreds_of_requests_over_a_small_pool_all_end_as_if_alone(lag):
    rng = random.Random(11)
    loop = Loop(lag=lag, num_blocks=12, max_num_batched_tokens=24, max_model_len=160)
    seqs = [
        loop.add(str(i), [rng.randrange(2)] * rng.randrange(1, 60), max_tokens=rng.randrange(1, 90))
        for i in range(512)
    ]
    loop.drain(max_steps=40_000)
    loop.assert_as_alone(*seqs)
    loop.assert_empty()
    assert sum(seq.epoch > 1 for seq in seqs) > 5  # preempted at least once, and the end


@both_lags
def test_a_resumed_sequence_is_not_preempted_again_without_progress(lag):
    """It used to be admitted for its first chunk only (vllm-project/vllm#25538)."""
    loop = Loop(lag=lag, num_blocks=10, max_num_batched_tokens=32, max_model_len=160)
    first = loop.add("first", [1] * 60, max_tokens=100)
    second = loop.add("second", [2] * 60, max_tokens=100)
    loop.drain()
    preempted = [name for output in loop.outputs for name in output.preempted]
    assert preempted == ["second"]
    loop.assert_as_alone(first, second)


@pytest.mark.parametrize(("num_prompt", "fits"), [(80, False), (64, True)])
def test_admission_leaves_room_to_grow_for_the_new_one_and_for_the_running_ones(num_prompt, fits):
    loop = Loop(lag=0, num_blocks=10, max_num_batched_tokens=128, max_model_len=160)
    loop.add("running", [1] * 60, max_tokens=90)
    loop.step()  # 4 blocks used, 1 kept for it: 5 for the new one, which wants 1 to grow
    seq = loop.add("new", [2] * num_prompt, max_tokens=20)
    loop.step()
    assert (seq.row >= 0) is fits


def test_a_waiting_request_notices_that_its_prefix_has_been_cached_meanwhile():
    loop = Loop(lag=0, num_blocks=10, max_num_batched_tokens=128, max_model_len=160)
    first = loop.add("first", [1] * 81, max_tokens=10)
    second = loop.add("second", [1] * 81, max_tokens=10)
    loop.step()
    assert second.row < 0
    loop.step()
    assert second.num_cached_tokens == 80
    assert first.finish_reason is None
    loop.drain()
    loop.assert_as_alone(first, second)


@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("policy", [FirstComeFirstServed(), Contrary(), RandomPolicy(8)])
def test_the_oldest_sequence_is_never_kept_waiting_for_a_block(policy, chunk):
    """Ahead by a step, every newer sequence is always in flight: one must be made to pause."""
    rng = random.Random(1)
    num_waits = 0
    for _ in range(40):
        loop = Loop(
            num_blocks=12,
            max_num_batched_tokens=chunk,
            max_num_seqs=4,
            max_model_len=160,
            policy=policy,
        )
        for index in range(12):
            prompt = [index] * rng.choice([1, 5, 60, 90])
            loop.add(str(index), prompt, max_tokens=rng.randrange(20, 70))
        missed = 0
        while loop.scheduler.has_unfinished:
            output = loop.schedule()
            running = loop.scheduler._placement.running.values()
            oldest = next(iter(running), None)
            if output is not None and oldest is not None and loop.in_flight:
                named = {entry.request_id for entry in output.entries}
                ends = oldest.num_scheduled >= oldest.max_length - 1
                missed = 0 if oldest.request_id in named or ends else missed + 1
                num_waits += missed
                assert missed <= 1
            if output is None or len(loop.in_flight) == 2:
                loop.update()
        loop.assert_as_alone(*loop.sequences.values())
    assert num_waits > 5  # it did come to that


@both_lags
def test_preemptions_are_bounded_by_progress(lag):
    loop = Loop(lag=lag, num_blocks=16, max_num_batched_tokens=16, max_model_len=256)
    seqs = [loop.add(str(index), [index] * 12, max_tokens=120) for index in range(8)]
    progress: dict[str, list[int]] = {seq.request_id: [] for seq in seqs}
    while loop.scheduler.has_unfinished:
        num_seen = len(loop.outputs)
        loop.step()
        for output in loop.outputs[num_seen:]:
            for name in output.preempted:
                progress[name].append(loop.sequences[name].num_output_tokens)
    for name, lengths in progress.items():
        assert lengths == sorted(set(lengths)), f"{name} was preempted twice at one length"
    loop.assert_as_alone(*seqs)


@both_lags
@pytest.mark.parametrize("max_bypass", [0, 1, 5])
def test_a_big_request_is_passed_over_a_bounded_number_of_times(lag, max_bypass):
    loop = Loop(num_blocks=8, max_model_len=128, max_bypass=max_bypass, lag=lag)
    small = 0

    def add_small() -> None:
        nonlocal small
        loop.add(f"small{small}", [small % 16] * 4, max_tokens=3 + small % 5)
        small += 1

    for _ in range(4):
        add_small()
    loop.step()
    big = loop.add("big", [1] * 90, max_tokens=4)
    for _ in range(200):
        add_small()
        loop.step()
        if big.row >= 0 or big.finish_reason:
            break
    else:
        pytest.fail("the big request was passed over for ever")
    started = [reset.request_id for output in loop.outputs for reset in output.row_resets]
    assert started.index("big") <= 4 + max_bypass
    loop.drain()
    loop.assert_as_alone(*loop.sequences.values())


def test_small_requests_need_not_wait_for_a_big_one():
    loop = Loop(num_blocks=8, max_model_len=128, lag=0)
    loop.add("running", [1] * 50, max_tokens=10)
    loop.step()
    big = loop.add("big", [2] * 90)
    small = loop.add("small", [3] * 4, max_tokens=2)
    loop.step()
    assert small.row >= 0
    assert big.row < 0


@both_lags
def test_big_requests_do_not_starve_small_ones(lag):
    loop = Loop(num_blocks=8, max_model_len=128, lag=lag)
    for index in range(3):
        loop.add(f"big{index}", [index] * 90)
    small = loop.add("small", [9])
    for index in range(200):
        loop.add(f"later{index}", [index % 16] * 90)
        loop.step()
        if small.finish_reason:
            break
    assert small.finish_reason == "length"


@both_lags
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [33, 40, 48])
def test_children_share_the_full_prompt_blocks_and_compute_the_tail(lag, caching, length):
    loop = Loop(lag=lag, enable_prefix_caching=caching)
    prompt = [token % 5 for token in range(length)]
    parent = loop.add("x", prompt, max_tokens=9)
    children = [
        loop.add(f"x-{index}", prompt, max_tokens=9, parent_id="x") for index in range(1, 3)
    ]
    while any(child.row < 0 for child in children):
        loop.step()
    assert all(child.num_cached_tokens == 32 for child in children)
    assert all(child.block_ids[:2] == parent.block_ids[:2] for child in children)
    blocks = loop.scheduler.block_manager
    assert [blocks.ref_count(block) for block in parent.block_ids[:2]] == [3, 3]
    assert len({seq.block_ids[2] for seq in (parent, *children)}) == 3
    loop.drain()
    loop.assert_as_alone(parent, *children)
    loop.assert_empty()
    assert loop.device.num_computed == length + 2 * (length - 32) + 3 * 8
    started = [reset.request_id for output in loop.outputs for reset in output.row_resets]
    assert started == ["x", "x-1", "x-2"]


@both_lags
def test_children_wait_for_the_whole_prompt_of_their_parent(lag):
    loop = Loop(lag=lag, max_num_batched_tokens=16)
    loop.add("x", [1] * 40)
    child = loop.add("x-1", [1] * 40, parent_id="x")
    loop.step()
    late = loop.add("x-2", [1] * 40, parent_id="x")
    for _ in range(2):
        assert child.row < 0
        assert late.row < 0
        loop.step()
    loop.drain()
    assert child.num_cached_tokens == late.num_cached_tokens == 32
    loop.assert_as_alone(child, late)


@both_lags
@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_child_whose_parent_is_aborted_prefills_alone(lag, when):
    loop = Loop(lag=lag, enable_prefix_caching=False, max_num_batched_tokens=16)
    loop.add("x", [1] * 40)
    children = [loop.add(f"x-{index}", [1] * 40, parent_id="x") for index in (1, 2)]
    for _ in range(when):
        loop.step()
    assert loop.scheduler.abort("x")
    loop.drain()
    loop.assert_as_alone(*children)
    loop.assert_empty()


def test_a_child_of_a_request_that_is_gone_or_differs_prefills_alone():
    loop = Loop(enable_prefix_caching=False)
    orphan = loop.add("orphan", [1] * 40, parent_id="nobody")
    parent = loop.add("x", [2] * 40, max_tokens=30)
    loop.step()
    loop.step()
    stranger = loop.add("y", [3] * 40, parent_id="x")
    loop.drain()
    assert orphan.num_cached_tokens == stranger.num_cached_tokens == 0
    loop.assert_as_alone(orphan, parent, stranger)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_child_does_not_wait_for_a_preempted_parent(when):
    loop = Loop(
        lag=0,
        num_blocks=8,
        max_num_batched_tokens=3,
        max_num_seqs=3,
        max_model_len=128,
        enable_prefix_caching=False,
    )
    old = [loop.add(f"old{index}", [index], max_tokens=60) for index in range(2)]
    loop.step()
    parent = loop.add("x", [5] * 60, max_tokens=4)
    children = []
    if when == "before":
        children.append(loop.add("x-1", [5] * 60, max_tokens=4, parent_id="x"))
    while parent.status is not SequenceStatus.PREEMPTED:
        assert not parent.is_prefilled
        loop.step()
    if when == "after":
        children.append(loop.add("x-1", [5] * 60, max_tokens=4, parent_id="x"))
    assert loop.scheduler._waiting._children == {}
    loop.drain()
    loop.assert_as_alone(*old, parent, *children)


def test_a_child_shares_what_the_cache_has_lost():
    """The parent's own blocks are not the findable copy, and that copy is evicted.

    What the child computes is published after all that comes before it.
    """
    loop = Loop(lag=0, num_blocks=11, max_num_seqs=2, max_num_batched_tokens=128)
    prompt = [1] * 40
    loop.add("twin", prompt, max_tokens=1)
    loop.add("x", prompt, max_tokens=50)
    loop.step()
    loop.add("evict", [2] * 97, max_tokens=1)
    while loop.sequences["evict"].finish_reason is None:
        loop.step()
    child = loop.add("x-1", prompt, max_tokens=20, parent_id="x")
    assert len(loop.scheduler.block_manager.lookup(prompt).block_ids) < 2
    loop.step()
    assert child.num_cached_tokens == 32
    assert child.block_ids[:2] == loop.sequences["x"].block_ids[:2]
    assert len(loop.scheduler.block_manager.lookup(prompt).block_ids) == 2
    loop.drain()
    loop.assert_as_alone(*loop.sequences.values())
    loop.assert_empty()


def test_a_child_of_another_salt_shares_nothing():
    loop = Loop(lag=0)
    loop.add("x", [1] * 40, max_tokens=9)
    loop.step()
    child = loop.add("x-1", [1] * 40, parent_id="x", cache_salt="other")
    loop.drain()
    assert child.num_cached_tokens == 0


def test_a_child_never_shares_what_its_parent_generates():
    """The last of these tokens is known before its K and V are written."""
    loop = Loop(lag=0, enable_prefix_caching=False)
    parent = loop.add("x", [1] * 16, max_tokens=40)
    while len(parent.token_ids) < 32:
        loop.step()
    child = loop.add("x-1", [*parent.token_ids, 3], parent_id="x")
    loop.drain()
    assert child.num_cached_tokens == 16
    loop.assert_as_alone(parent, child)


@both_lags
def test_aborting_a_group_in_any_order_gives_everything_back(lag):
    for order in ("x x-1 x-2", "x-2 x x-1", "x-1 x-2 x"):
        for num_steps in range(6):
            loop = Loop(lag=lag, enable_prefix_caching=False, max_num_batched_tokens=16)
            loop.add("x", [1] * 40, max_tokens=9)
            for index in (1, 2):
                loop.add(f"x-{index}", [1] * 40, max_tokens=9, parent_id="x")
            for _ in range(num_steps):
                loop.step()
            for name in order.split():
                assert loop.scheduler.abort(name)
            loop.drain()
            loop.assert_empty()


def test_counts_tell_preemptions_and_prompt_tokens_found_in_the_cache():
    loop = Loop()
    for name in ("cold", "warm"):
        loop.add(name, [1] * 33)
        loop.drain()
    loop.add("asks for logits", [1] * 33, prompt_logits=True)  # so it is not looked up
    loop.drain()
    assert loop.scheduler.counts == {"queried_tokens": 66, "cached_tokens": 32}
    loop = Loop(lag=0, num_blocks=8, max_model_len=128)
    seqs = [loop.add(str(index), [index + 1] * 17, max_tokens=60) for index in range(3)]
    loop.drain()
    assert loop.scheduler.counts["preemptions"] == sum(seq.epoch - 1 for seq in seqs) > 0
    assert loop.scheduler.counts["queried_tokens"] == 51  # a resumed one does not count again
