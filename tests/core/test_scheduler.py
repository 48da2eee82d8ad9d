"""What is accepted, how a request ends, and what a step may hold."""

from __future__ import annotations

import random

import pytest

from support.fake_device import Loop, alone
from tvr.core import Result, Scheduler, Sequence
from tvr.errors import ConfigError, RequestError

both_lags = pytest.mark.parametrize("lag", [0, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"max_model_len": 1}, "max_model_len = 1"),
        ({"max_bypass": -1}, "max_bypass = -1"),
        ({"max_lag": 2}, "max_lag = 2"),
        ({"max_num_batched_tokens": 3}, "at least max_num_seqs = 4"),
        ({"num_blocks": 0}, "num_blocks = 0"),
        ({"block_size": 0}, "block_size = 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(change, message):
    settings = {
        "num_blocks": 8,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": 64,
    }
    with pytest.raises(ConfigError, match=message):
        Scheduler(**settings | change)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1], {"max_tokens": 0}, "max_tokens = 0, must be at least 1"),
        ([1], {"max_lag": 2}, "max_lag = 2"),
        ([1], {"max_lag": -1}, "max_lag = -1"),
        ([1], {"max_tokens": 2.5}, "max_tokens = 2.5, must be a whole number"),
        ([1], {"max_tokens": None}, "max_tokens = None, must be a whole number"),
        ([1], {"min_tokens": "2"}, "min_tokens = '2', must be a whole number"),
        ([1], {"cache_salt": ["a"]}, r"cache_salt = \['a'\], must be a text or None"),
        ([1] * 256, {"max_tokens": 1}, "prompt of 256 tokens .* max_model_len = 256 allows 255"),
        ([1] * 257, {"max_tokens": 1}, "prompt of 257 tokens"),
        (
            [1] * 100,
            {"max_tokens": 62},
            "100 prompt tokens and up to 62 new ones need 11 KV blocks of 16, the pool has 10",
        ),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_numbers(prompt, options, message):
    loop = Loop(num_blocks=10)
    with pytest.raises(RequestError, match=message):
        loop.add("x", prompt, **options)
    assert not loop.scheduler.has_unfinished
    loop.add("x", [1, 2, 3])
    loop.drain()
    loop.assert_as_alone(loop.sequences["x"])


@both_lags
@pytest.mark.parametrize("num_prompt", [100, 160])
def test_the_largest_request_that_fits_runs(lag, num_prompt):
    loop = Loop(num_blocks=10, lag=lag)
    max_tokens = 161 - num_prompt  # the last token needs no slot
    seq = loop.add("x", [1] * num_prompt, max_tokens=max_tokens)
    loop.drain()
    assert seq.num_output_tokens == max_tokens
    loop.assert_as_alone(seq)
    loop.assert_empty()


@both_lags
def test_a_prompt_one_short_of_the_model_length_gives_one_token(lag):
    loop = Loop(lag=lag)
    seq = loop.add("x", [1] * 255, max_tokens=1)
    loop.drain()
    assert (seq.num_output_tokens, seq.finish_reason) == (1, "length")


@both_lags
def test_the_model_length_limits_max_tokens(lag):
    loop = Loop(lag=lag)
    seq = loop.add("x", [1] * 151, max_tokens=200)
    loop.drain()
    assert (seq.num_output_tokens, seq.finish_reason) == (105, "length")


@both_lags
@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_max_tokens_is_exact_and_costs_no_step_more(lag, max_tokens):
    loop = Loop(lag=lag)
    seq = loop.add("x", [1, 2, 3], max_tokens=max_tokens)
    loop.drain()
    assert (seq.num_output_tokens, seq.finish_reason) == (max_tokens, "length")
    assert len(loop.outputs) == max_tokens
    assert loop.device.num_computed == 3 + max_tokens - 1


def test_a_second_live_request_of_one_id_is_refused_until_the_first_ends():
    loop = Loop()
    first = loop.add("x", [1, 2])
    with pytest.raises(RequestError, match="'x': a live request has that id"):
        loop.scheduler.add(Sequence("x", [3], max_tokens=1))
    loop.drain()
    loop.assert_as_alone(first)
    second = loop.add("x", [3])
    loop.drain()
    loop.assert_as_alone(second)


def test_an_id_is_free_at_once_though_its_last_step_is_in_flight():
    loop = Loop()
    loop.add("x", [1, 2], max_tokens=9)
    loop.schedule()
    loop.schedule()
    assert loop.scheduler.abort("x")
    second = loop.add("x", [5], max_tokens=5)
    loop.drain()
    loop.assert_as_alone(second)


def test_a_sequence_is_run_once():
    loop = Loop()
    seq = loop.add("x", [1, 2])
    loop.drain()
    with pytest.raises(RequestError, match="is finished already"):
        loop.scheduler.add(seq)


@both_lags
def test_a_stop_token_ends_and_is_kept(lag):
    prompt = [1, 2, 3]
    tokens, _ = alone(prompt, max_tokens=20, max_model_len=256)
    stop = tokens[6]
    first = tokens.index(stop) + 1
    loop = Loop(lag=lag)
    seq = loop.add("x", prompt, max_tokens=20, stop_token_ids=frozenset({stop}))
    loop.drain()
    assert (seq.output_token_ids, seq.finish_reason) == (tokens[:first], "stop")
    assert len(loop.outputs) == first + lag  # running ahead costs one discarded step
    loop.assert_empty()


@both_lags
@pytest.mark.parametrize("extra", [0, 1])
def test_a_stop_token_before_min_tokens_does_not_end(lag, extra):
    prompt = [1, 2, 3]
    tokens, _ = alone(prompt, max_tokens=20, max_model_len=256)
    index = tokens.index(tokens[6])
    loop = Loop(lag=lag)
    stops = frozenset({tokens[index]})
    seq = loop.add(
        "x", prompt, max_tokens=index + 2, min_tokens=index + 1 + extra, stop_token_ids=stops
    )
    loop.drain()
    assert seq.num_output_tokens == index + 1 + extra
    loop.assert_as_alone(seq)


def test_a_stop_token_at_the_length_limit_is_a_stop():
    tokens, _ = alone([1, 2, 3], max_tokens=1, max_model_len=256)
    loop = Loop()
    seq = loop.add("x", [1, 2, 3], max_tokens=1, stop_token_ids=frozenset(tokens))
    loop.drain()
    assert seq.finish_reason == "stop"


def test_a_result_without_a_token_ends_its_own_sequence_only():
    loop = Loop(lag=0)
    bad, good = loop.add("bad", [1, 2]), loop.add("good", [1, 2])
    output = loop.schedule()
    step = loop.in_flight.pop()
    results = loop.device.run(step, unchecked=lambda seq: False)
    results[0] = Result("bad", 0, None, "logits hold NaN")
    updates = loop.scheduler.update(output.step_id, results)
    assert [update.finish_reason for update in updates] == ["error", None]
    assert (updates[0].error, updates[0].token) == ("logits hold NaN", None)
    assert (bad.finish_reason, bad.output_token_ids) == ("error", [])
    loop.drain()
    loop.assert_as_alone(good)
    loop.assert_empty()


def test_what_a_failed_result_wrote_is_not_shared():
    """Its K and V may be NaN."""
    loop = Loop(lag=0)
    loop.add("bad", [1] * 20)
    loop.schedule()
    loop.in_flight.pop()
    loop.scheduler.update(0, [Result("bad", 0, None)])
    assert loop.scheduler.block_manager.counts().cached == 0
    seq = loop.add("next", [1] * 20)
    loop.schedule()
    assert seq.num_cached_tokens == 0


def test_logprobs_pass_through():
    scheduler = Loop().scheduler
    scheduler.add(Sequence("x", [1], max_tokens=2))
    scheduler.schedule()
    (update,) = scheduler.update(0, [Result("x", 0, 5, logprobs={5: -0.1})])
    assert update.logprobs == {5: -0.1}


def test_decodes_come_first_and_chunks_fill_the_budget():
    loop = Loop(lag=0, max_num_batched_tokens=16)
    loop.add("short", [1, 2, 3], max_tokens=9)
    loop.step()
    loop.add("long", [5] * 40)
    output = loop.schedule()
    assert output.num_decodes == 1
    assert [(e.request_id, e.start, e.num_tokens, e.samples) for e in output.entries] == [
        ("short", 3, 1, True),
        ("long", 0, 15, False),
    ]
    assert output.num_tokens == 16


@both_lags
@pytest.mark.parametrize("chunk", [16, 64])
def test_only_the_last_chunk_of_a_prompt_samples(lag, chunk):
    """A token sampled from a partial chunk must not be kept; a finished row goes on beside it."""
    loop = Loop(lag=lag, max_num_batched_tokens=chunk, max_num_seqs=4)
    beside = loop.add("beside", [7], max_tokens=12)
    loop.step()
    seq = loop.add("x", list(range(40)), max_tokens=3)
    loop.drain()
    entries = [e for output in loop.outputs for e in output.entries if e.request_id == "x"]
    prefills = [e for e in entries if e.start < 40]
    assert [e.samples for e in prefills] == [False] * (len(prefills) - 1) + [True]
    assert [e.logit_rows for e in prefills] == [int(e.samples) for e in prefills]
    assert sum(e.num_tokens for e in prefills) == 40
    loop.assert_as_alone(seq, beside)


@both_lags
def test_many_short_requests_leave_no_block_behind(lag):
    rng = random.Random(3)
    loop = Loop(lag=lag, num_blocks=24, max_num_seqs=8)
    seqs = []
    for index in range(2000):
        prompt = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
        seqs.append(loop.add(str(index), prompt, max_tokens=rng.randrange(1, 4)))
        if index % 8 == 7:
            loop.step()
    loop.drain()
    loop.assert_empty()
    loop.assert_as_alone(*seqs)


def test_the_time_of_a_step_grows_with_the_running_sequences_not_with_the_waiting_ones():
    """Counted in queue visits, not in seconds: a full pool looks at a bounded part of the line."""
    loop = Loop(num_blocks=10, max_bypass=4, max_model_len=160)
    loop.add("running", [1] * 90, max_tokens=60)
    loop.step()
    for index in range(500):
        loop.add(f"big{index}", [index] * 96)
    placement = loop.scheduler._placement
    visited: list[str] = []
    place = placement.place
    placement.place = lambda seq, parent: visited.append(seq.request_id) or place(seq, parent)
    loop.schedule()
    assert len(visited) == 1 + 4
