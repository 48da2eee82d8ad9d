"""What a policy decides, and what it cannot: whatever it answers, the scheduler's rules hold."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from support.fake_device import Loop
from support.policies import Contrary, RandomPolicy
from tvr.core import (
    FirstComeFirstServed,
    PriorityFirst,
    Scheduler,
    Sequence,
    SequenceStatus,
    ShortestPromptFirst,
)
from tvr.errors import ConfigError, PolicyError, RequestError

both_lags = pytest.mark.parametrize("lag", [0, 1])
POLICIES = {
    "first come": FirstComeFirstServed,
    "shortest": ShortestPromptFirst,
    "priority": PriorityFirst,
    "contrary": Contrary,
    "random": lambda: RandomPolicy(5),
}
every_policy = pytest.mark.parametrize("make_policy", POLICIES.values(), ids=POLICIES)


def started(loop: Loop) -> list[str]:
    """Return the ids in the order of admission."""
    return [reset.request_id for output in loop.outputs for reset in output.row_resets]


def preempted(loop: Loop) -> list[str]:
    return [name for output in loop.outputs for name in output.preempted]


@both_lags
def test_short_prompts_go_first_and_equal_ones_as_they_came(lag):
    loop = Loop(lag=lag, max_num_seqs=1, policy=ShortestPromptFirst())
    for name, length in (("a", 30), ("b", 10), ("c", 20), ("d", 10)):
        loop.add(name, [1] * length, max_tokens=2)
    loop.drain()
    assert started(loop) == ["b", "d", "c", "a"]


@both_lags
def test_urgent_sequences_are_admitted_first_and_keep_their_blocks(lag):
    loop = Loop(lag=lag, num_blocks=8, max_model_len=128, policy=PriorityFirst())
    priorities = {"oldest": 9, "late": 5, "soon": 2, "now": -1}
    for index, (name, priority) in enumerate(priorities.items()):
        loop.add(name, [index] * 8, max_tokens=60, priority=priority)
    loop.drain()
    assert started(loop)[:4] == ["now", "soon", "late", "oldest"]
    # "oldest" is the least urgent of all, but nobody takes blocks from the oldest.
    assert preempted(loop)[:2] == ["late", "soon"]
    assert "oldest" not in preempted(loop)
    loop.assert_as_alone(*loop.sequences.values())


@pytest.mark.parametrize("priority", ["high", None, float("nan"), 0.5])
def test_a_priority_that_is_no_number_is_refused_and_costs_nobody_the_policy(priority):
    """Taken in, it made the policy fail: one bad request set it aside for all the others."""
    loop = Loop(policy=PriorityFirst())
    with pytest.raises(RequestError, match=r"request 'bad': priority = .*, must be a whole number"):
        loop.add("bad", [1, 2], priority=priority)
    loop.add("good", [1, 2])
    loop.drain()
    assert type(loop.scheduler.policy) is PriorityFirst


def test_a_sequence_waits_for_blocks_rather_than_take_those_of_one_that_outranks_it():
    """In the end it even gives way to that one, though it came first."""
    loop = Loop(lag=0, num_blocks=6, policy=PriorityFirst())
    oldest = loop.add("oldest", [1] * 4, max_tokens=44)
    meek = loop.add("meek", [2] * 14, max_tokens=60, priority=7)
    urgent = loop.add("urgent", [3] * 5, max_tokens=40, priority=1)
    num_waits = 0
    while meek.status is not SequenceStatus.PREEMPTED:
        loop.step()
        names = [entry.request_id for entry in loop.outputs[-1].entries]
        num_waits += meek.num_scheduled == 32 and "meek" not in names
    assert num_waits > 5
    loop.drain()
    assert preempted(loop) == ["meek"]
    loop.assert_as_alone(oldest, meek, urgent)


@both_lags
@every_policy
def test_the_oldest_sequence_is_never_preempted(lag, make_policy):
    loop = Loop(lag=lag, num_blocks=8, max_model_len=128, policy=make_policy())
    seqs = [loop.add(str(i), [i] * (9 - i), max_tokens=60, priority=-i) for i in range(6)]
    while loop.scheduler.has_unfinished:
        oldest = next(seq for seq in seqs if seq.finish_reason is None)
        was_running = oldest.status is SequenceStatus.RUNNING
        loop.schedule()
        assert oldest.status is SequenceStatus.RUNNING or not was_running
        if loop.in_flight:
            loop.update()
    assert preempted(loop)
    loop.assert_as_alone(*seqs)


@both_lags
@pytest.mark.parametrize("max_bypass", [0, 1, 5])
@pytest.mark.parametrize("make_policy", [ShortestPromptFirst, Contrary])
def test_a_sequence_is_passed_over_a_bounded_number_of_times(lag, max_bypass, make_policy):
    loop = Loop(lag=lag, max_num_seqs=2, max_bypass=max_bypass, policy=make_policy())
    seqs = [loop.add("long", [1] * 50)]
    for index in range(60):
        seqs.append(loop.add(str(index), [2] * (1 + index % 9)))
        loop.step()
    loop.drain()
    waiting = [seq.request_id for seq in seqs]
    num_passed = Counter()
    for name in started(loop):
        num_passed[waiting[0]] += name != waiting[0]
        waiting.remove(name)
    assert max(num_passed.values()) == max_bypass
    loop.assert_as_alone(*seqs)


def test_without_bypass_any_order_of_admission_is_that_of_arrival():
    loop = Loop(max_num_seqs=2, max_bypass=0, policy=Contrary())
    names = [loop.add(str(index), [1] * 5).request_id for index in range(9)]
    loop.drain()
    assert started(loop) == names


def test_begun_answers_go_on_before_new_ones_begin():
    begun, new = Sequence("begun", [1] * 50, max_tokens=9), Sequence("new", [1], max_tokens=9)
    begun.token_ids.append(1)
    rank = ShortestPromptFirst().admission_rank
    assert rank(begun) < rank(new)


@both_lags
def test_a_short_prompt_goes_before_the_chunks_of_a_long_one(lag):
    loop = Loop(lag=lag, max_num_batched_tokens=16, policy=ShortestPromptFirst())
    loop.add("oldest", [1], max_tokens=40)
    loop.step()
    long = loop.add("long", [2] * 100)
    loop.schedule()
    short = loop.add("short", [3] * 10)
    loop.update()
    output = loop.schedule()
    chunks = [(e.request_id, e.num_tokens) for e in output.entries[output.num_decodes :]]
    assert chunks == [("short", 10), ("long", 5)]
    loop.drain()
    loop.assert_as_alone(long, short)


@both_lags
def test_no_prompt_goes_before_the_chunks_of_the_oldest(lag):
    """Else an endless line of short prompts could keep it from its end."""
    loop = Loop(lag=lag, max_num_batched_tokens=16, policy=ShortestPromptFirst())
    loop.add("oldest", [1] * 100)
    loop.step()
    loop.add("short", [3] * 2)
    while (output := loop.schedule()) and output.entries[0].start < 80:
        assert [e.request_id for e in output.entries] == ["oldest"]
        loop.update()


def two_prefills(max_tokens: int) -> Loop:
    """Return a loop in which a short prompt's chunks go before those of an older, long one."""
    loop = Loop(lag=0, max_num_batched_tokens=16, policy=ShortestPromptFirst())
    loop.add("oldest", [1], max_tokens=max_tokens)
    loop.step()
    loop.add("long", [2] * 100)
    loop.step()
    loop.add("short", [3] * 60)
    loop.step()
    assert [entry.request_id for entry in loop.outputs[-1].entries] == ["oldest", "short"]
    return loop


def next_chunk(loop: Loop) -> str:
    output = loop.schedule()
    loop.update()
    return output.entries[output.num_decodes].request_id


def test_the_chunks_of_a_prompt_go_first_once_it_is_the_oldest():
    loop = two_prefills(max_tokens=3)
    assert loop.sequences["oldest"].finish_reason == "length"
    assert next_chunk(loop) == "long"


def test_another_policy_orders_the_chunks_of_prompts_anew():
    loop = two_prefills(max_tokens=9)
    assert next_chunk(loop) == "short"
    loop.scheduler.policy = FirstComeFirstServed()
    assert next_chunk(loop) == "long"


@both_lags
def test_an_endless_line_of_short_prompts_does_not_stop_a_long_prefill(lag):
    loop = Loop(lag=lag, max_num_batched_tokens=16, max_num_seqs=16, policy=ShortestPromptFirst())
    loop.add("oldest", [9], max_tokens=30)
    loop.step()
    long = loop.add("long", [1] * 200)
    for index in range(400):
        loop.add(f"a{index}", [2] * 8, max_tokens=1)
        loop.add(f"b{index}", [3] * 8, max_tokens=1)
        loop.step()
        if long.finish_reason:
            break
    assert long.finish_reason == "length"


class Capped(FirstComeFirstServed):
    """Grants a fixed number of prefill tokens; keeps what it was asked."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.asked: list[tuple[int, int]] = []

    def prefill_budget(self, num_tokens: int, num_decodes: int) -> int:
        self.asked.append((num_tokens, num_decodes))
        return self.cap


@both_lags
@pytest.mark.parametrize(("cap", "granted"), [(0, 1), (1, 1), (7, 7), (62, 62), (10**9, 62)])
def test_the_prefill_budget_is_kept_to(lag, cap, granted):
    policy = Capped(cap)
    loop = Loop(lag=lag, policy=policy)
    loop.add("a", [1], max_tokens=40)
    loop.add("b", [2], max_tokens=40)
    loop.step()
    while loop.scheduler.num_waiting:
        loop.step()
    loop.step()
    policy.asked.clear()
    long = loop.add("long", [3] * 100)
    output = loop.schedule()
    assert policy.asked == [(62, 2)]
    assert [e.num_tokens for e in output.entries] == [1, 1, granted]
    assert output.num_tokens == 2 + granted
    loop.drain(max_steps=200)
    loop.assert_as_alone(long)


def test_a_policy_is_asked_no_more_than_needed():
    asked: list[tuple[str, str]] = []

    class Curious(Capped):
        def admission_rank(self, seq):
            asked.append(("admission", seq.request_id))
            return super().admission_rank(seq)

        def preemption_rank(self, seq):
            asked.append(("preemption", seq.request_id))
            return super().preemption_rank(seq)

    policy = Curious(64)
    loop = Loop(lag=0, num_blocks=8, max_model_len=128, policy=policy)
    for index in range(4):
        loop.add(str(index), [index] * 8, max_tokens=60)
    loop.step()
    assert asked == [("admission", str(index)) for index in range(4)]
    assert policy.asked == [(64, 0)]
    while not preempted(loop):
        assert len(asked) == 4  # while there are blocks for all, nobody ranks
        loop.step()
    assert len(policy.asked) == 1  # and while nobody waits or prefills, no budget is shared
    assert asked[4:] == [("preemption", name) for name in "123"]
    del asked[:]
    loop.step()
    assert asked[0] == ("admission", "3")


@both_lags
@every_policy
def test_tokens_do_not_depend_on_the_policy(lag, make_policy):
    rng = random.Random(12)
    loop = Loop(
        lag=lag,
        num_blocks=12,
        max_num_batched_tokens=24,
        max_model_len=160,
        policy=make_policy(),
    )
    seqs = []
    for index in range(150):
        prompt = [rng.randrange(2)] * rng.randrange(1, 60)
        options = {"max_tokens": rng.randrange(1, 90), "priority": rng.randrange(3)}
        seqs.append(loop.add(str(index), prompt, **options))
        if index % 5 == 0:
            seqs.append(loop.add(f"{index}-child", prompt, parent_id=str(index), **options))
        if index % 3 == 0:
            loop.step()
    loop.drain(max_steps=40_000)
    assert len(preempted(loop)) > 5
    loop.assert_as_alone(*seqs)
    loop.assert_empty()


def failing(question: str, answer: object) -> FirstComeFirstServed:
    """Return a policy that gives one question that answer, or raises it."""

    class Failing(FirstComeFirstServed):
        pass

    def reply(self: Failing, *args: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    setattr(Failing, question, reply)
    return Failing()


TROUBLES = [
    ("admission_rank", None, "admission_rank returned None, not a number or a tuple of numbers"),
    ("admission_rank", float("nan"), "admission_rank returned nan, not a number"),
    ("admission_rank", (1, "x"), r"admission_rank returned \(1, 'x'\), not a number"),
    ("admission_rank", 1j, "admission_rank returned 1j"),
    ("admission_rank", KeyError("tenant"), "admission_rank raised KeyError: 'tenant'"),
    ("preemption_rank", "last", "preemption_rank returned 'last', not a number"),
    ("preemption_rank", ZeroDivisionError("by zero"), "preemption_rank raised ZeroDivisionError"),
    ("prefill_budget", -1, "prefill_budget returned -1, not a whole number of tokens, 0 or more"),
    ("prefill_budget", 3.5, "prefill_budget returned 3.5, not a whole number"),
    ("prefill_budget", None, "prefill_budget returned None"),
    ("prefill_budget", RuntimeError("oo\nps"), "prefill_budget raised RuntimeError: oo ps"),
]


@both_lags
@pytest.mark.parametrize(("question", "answer", "message"), TROUBLES)
def test_a_policy_that_fails_gives_one_error_and_nothing_is_lost(lag, question, answer, message):
    loop = Loop(lag=lag, num_blocks=8, max_model_len=128, policy=failing(question, answer))
    seqs = [loop.add(str(index), [index] * 8, max_tokens=60) for index in range(4)]

    def state() -> object:
        places = [(seq.row, seq.status, seq.num_scheduled, list(seq.block_ids)) for seq in seqs]
        scheduler = loop.scheduler
        counts = scheduler.block_manager.counts()
        return places, counts, scheduler.num_waiting, scheduler.num_running, scheduler.num_in_flight

    for _ in range(200):
        before = state()
        try:
            loop.schedule()
        except PolicyError as caught:
            error = caught
            break
        if len(loop.in_flight) > lag:
            loop.update()
    else:
        pytest.fail("the policy was never asked")
    assert state() == before
    with pytest.raises(PolicyError, match=f"scheduling policy Failing: {message}"):
        raise error
    assert "first come, first served" in str(error)
    assert "\n" not in str(error)
    if isinstance(answer, Exception):
        assert error.__cause__ is answer
    assert type(loop.scheduler.policy) is FirstComeFirstServed
    loop.drain()
    loop.assert_as_alone(*seqs)
    loop.assert_empty()


def test_an_interrupt_in_a_policy_goes_through_and_leaves_it_in_force():
    class Interrupted(FirstComeFirstServed):
        num_calls = 0

        def admission_rank(self, seq):
            self.num_calls += 1
            if self.num_calls == 2:
                raise KeyboardInterrupt
            return 0

    policy = Interrupted()
    loop = Loop(policy=policy)
    seqs = [loop.add(str(index), [index] * 8) for index in range(4)]
    with pytest.raises(KeyboardInterrupt):
        loop.schedule()
    assert loop.scheduler.policy is policy
    loop.drain()
    loop.assert_as_alone(*seqs)


def test_a_message_that_cannot_be_printed_sets_the_policy_aside_too():
    class Mute:
        def __repr__(self):
            raise RuntimeError("no words")

    loop = Loop(policy=failing("admission_rank", Mute()))
    seq = loop.add("x", [1])
    with pytest.raises(RuntimeError, match="no words"):
        loop.schedule()
    loop.drain()
    loop.assert_as_alone(seq)


def test_another_policy_ranks_all_that_wait_anew():
    loop = Loop(lag=0, max_num_seqs=1, policy=ShortestPromptFirst())
    for name, length, priority in (("a", 9, 0), ("b", 30, 2), ("c", 20, 3), ("d", 40, 1)):
        loop.add(name, [1] * length, max_tokens=1, priority=priority)
    loop.step()
    loop.step()
    loop.scheduler.policy = PriorityFirst()
    loop.drain()
    assert started(loop) == ["a", "c", "d", "b"]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (ShortestPromptFirst, "is a class, not an object of it"),
        ("shortest", "'shortest' lacks admission_rank, preemption_rank, prefill_budget; give an"),
        (7, "policy = 7 lacks"),
    ],
)
def test_what_is_no_policy_is_refused_and_the_old_one_stays(policy, message):
    settings = {"num_blocks": 8, "max_num_seqs": 1, "max_num_batched_tokens": 8}
    with pytest.raises(ConfigError, match=message):
        Scheduler(**settings, max_model_len=64, policy=policy)
    old = ShortestPromptFirst()
    scheduler = Scheduler(**settings, max_model_len=64, policy=old)
    with pytest.raises(ConfigError, match=message):
        scheduler.policy = policy
    assert scheduler.policy is old


def test_a_policy_needs_no_base_class():
    class Backwards:
        def admission_rank(self, seq):
            return -seq.arrival

        def preemption_rank(self, seq):
            return seq.arrival

        def prefill_budget(self, num_tokens, num_decodes):
            return num_tokens

    loop = Loop(max_num_seqs=1, policy=Backwards())
    for name in "abc":
        loop.add(name, [1])
    loop.drain()
    assert started(loop) == ["c", "b", "a"]


def test_a_long_line_is_not_searched_whatever_the_policy():
    loop = Loop(num_blocks=10, max_bypass=4, max_model_len=160, max_num_seqs=16, policy=Contrary())
    loop.add("running", [1] * 90, max_tokens=60)
    while not loop.sequences["running"].is_prefilled:
        loop.step()
    for index in range(500):
        loop.add(f"big{index}", [index] * 96)
    placement = loop.scheduler._placement
    visited: list[str] = []
    place = placement.place
    placement.place = lambda seq, parent: visited.append(seq.request_id) or place(seq, parent)
    loop.schedule()
    assert visited == [f"big{499 - index}" for index in range(5)]
