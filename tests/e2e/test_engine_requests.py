"""Requests at the engine's door: limits, ids, bad input, aborts."""

from __future__ import annotations

import itertools

import pytest
import torch

from support.engines import (
    all_blocks_came_back,
    delays,
    drain,
    engine,
    greedy,
    prompts_of,
    save_shape,
    save_text_model,
    tokens_of,
)
from tvr import LLM, SamplingParams
from tvr.core.runner import ModelRunner
from tvr.errors import CapacityError, ConfigError, RequestError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text_checkpoint(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(params=[0, 1], ids=["lag0", "lag1"])
def llm(checkpoint, request, monkeypatch):
    with delays(monkeypatch), engine(checkpoint, max_lag=request.param) as llm:
        yield llm


def test_one_token_asked_for_is_one_token_made_in_one_step(llm, monkeypatch):
    steps = []
    run = ModelRunner._run
    monkeypatch.setattr(ModelRunner, "_run", lambda *a: (steps.append(1), run(*a))[1])
    (output,) = llm.generate(prompts_of([20]), greedy(1))
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"
    assert len(steps) == 1


def test_the_context_limits_the_new_tokens(llm):
    (prompt,) = prompts_of([151])
    output = llm.generate(prompt, greedy(200))[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (105, "length")
    everything = llm.generate(prompt, SamplingParams(max_tokens=None, ignore_eos=True, seed=1))
    assert len(everything[0].outputs[0].token_ids) == 105


def test_a_prompt_may_fill_the_context_but_for_one_token(llm):
    fits, full, over = prompts_of([255, 256, 257])
    assert len(llm.generate(fits, greedy(1))[0].outputs[0].token_ids) == 1
    for prompt in (full, over):
        with pytest.raises(RequestError, match=f"{len(prompt)} tokens.*256"):
            llm.generate(prompt, greedy(1))
    assert len(llm.generate(fits, greedy(5))[0].outputs[0].token_ids) == 1


def test_an_id_in_use_is_refused_and_free_again_afterwards(llm):
    first, second = prompts_of([20, 30])
    llm.add_request("x", first, greedy(8))
    with pytest.raises(RequestError, match="'x' is in use"):
        llm.add_request("x", second, greedy(8))
    assert len(drain(llm)["x"].outputs[0].token_ids) == 8
    llm.add_request("x", second, greedy(4))
    assert len(drain(llm)["x"].outputs[0].token_ids) == 4


def test_an_id_can_be_taken_again_while_the_discarded_step_is_in_flight(checkpoint):
    """The old request's last step must not feed the new request of the same name."""
    prompt, other = prompts_of([20, 23])
    with engine(checkpoint, max_lag=1) as llm:
        whole = tokens_of(llm.generate([prompt, other], greedy(16)))
    with engine(checkpoint, max_lag=1, enable_prefix_caching=False) as llm:
        llm.add_request("x", prompt, greedy(16, stop_token_ids=[whole[0][3]]))
        while not any(o.finished for o in llm.step()):
            pass
        llm.add_request("x", other, greedy(16))
        assert drain(llm)["x"].outputs[0].token_ids == whole[1]


def test_an_id_of_one_of_n_answers_counts_as_taken(llm):
    (prompt,) = prompts_of([20])
    llm.add_request("x", prompt, SamplingParams(n=2, seed=1, max_tokens=4))
    with pytest.raises(RequestError, match=r"x\[1\]"):
        llm.add_request("x[1]", prompt, greedy(4))
    drain(llm)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "no token ids"),
        ([-1], "-1"),
        ([131], "from 0 to 130"),
        ([1.5], "1.5"),
        ([True], "True"),
        (5, "int"),
        (None, "NoneType"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one"),
        ({}, "exactly one"),
        ("text", "tokenizer"),
    ],
)
def test_a_bad_prompt_is_refused_in_one_line_and_loses_nothing(llm, prompt, message):
    llm.add_request("good", prompts_of([20])[0], greedy(6))
    with pytest.raises(RequestError, match=message) as caught:
        llm.add_request("bad", prompt, greedy(4))
    assert "\n" not in str(caught.value)
    assert len(drain(llm)["good"].outputs[0].token_ids) == 6
    assert all_blocks_came_back(llm)


def test_a_bad_prompt_in_a_list_starts_none_of_them(llm):
    with pytest.raises(RequestError):
        llm.generate([prompts_of([20])[0], [999]], greedy(4))
    assert not llm.has_unfinished_requests()
    assert all_blocks_came_back(llm)


def test_a_stop_id_outside_the_vocabulary_is_refused(llm):
    (prompt,) = prompts_of([20])
    with pytest.raises(RequestError, match="151645"):
        llm.generate(prompt, greedy(4, stop_token_ids=[151645]))


def test_params_must_match_the_prompts(llm):
    with pytest.raises(RequestError, match="2 prompts came with 1"):
        llm.generate(prompts_of([5, 6]), [greedy(4)])


def test_prompts_and_params_may_come_as_lists_or_tuples(llm):
    prompts, params = prompts_of([5, 6]), [greedy(4), greedy(3)]
    expected = tokens_of(llm.generate(prompts, params))
    assert [len(tokens) for tokens in expected] == [4, 3]
    assert tokens_of(llm.generate(tuple(prompts), tuple(params))) == expected
    assert tokens_of(llm.generate(tuple(prompts[0]), params[0])) == expected[:1]
    assert llm.generate([]) == []


def test_min_tokens_puts_off_the_stop(llm):
    (prompt,) = prompts_of([20])
    whole = llm.generate(prompt, greedy(16))[0].outputs[0].token_ids
    params = greedy(16, stop_token_ids=[whole[0]], min_tokens=5)
    output = llm.generate(prompt, params)[0].outputs[0]
    assert whole[0] not in output.token_ids[:4]
    assert len(output.token_ids) >= 5


def test_abort_at_every_moment_gives_all_back(llm):
    prompts = prompts_of([100, 33])
    for moment in range(12):
        llm.add_request("x", prompts[0], greedy(30))
        llm.add_request("y", prompts[1], greedy(10))
        outputs = {}
        for _ in range(moment):
            outputs.update({o.request_id: o for o in llm.step()})
        llm.abort("x")
        outputs.update(drain(llm))
        reasons = {i: o.outputs[0].finish_reason for i, o in outputs.items()}
        assert reasons.get("x", "abort") == "abort"
        assert reasons["y"] == "length"
        assert all_blocks_came_back(llm)
    llm.abort("unknown")
    assert drain(llm) == {}


def test_a_closed_stream_aborts_its_request(llm):
    stream = llm.stream(prompts_of([20])[0], greedy(100))
    next(stream)
    stream.close()
    assert not llm.has_unfinished_requests()
    assert all_blocks_came_back(llm)


def test_streams_may_be_consumed_in_turn(llm):
    prompts = prompts_of([20, 33])
    expected = [llm.generate(p, greedy(10))[0].outputs[0].token_ids for p in prompts]
    streams = [llm.stream(p, greedy(10)) for p in prompts]
    last = [None, None]
    for _ in range(10):
        for i, stream in enumerate(streams):
            last[i] = next(stream, last[i])
    for i, stream in enumerate(streams):
        for output in stream:
            last[i] = output
    assert [o.outputs[0].token_ids for o in last] == expected


def test_generate_does_not_swallow_outputs_of_added_requests(llm):
    first, second = prompts_of([20, 33])
    llm.add_request("x", first, greedy(3))
    llm.generate(second, greedy(12))
    assert len(drain(llm)["x"].outputs[0].token_ids) == 3


def test_a_row_without_a_valid_logit_fails_alone(checkpoint, monkeypatch):
    """A NaN in one request's logits must end that one and leave its neighbours as they were."""
    prompts = prompts_of([20, 33, 17])
    with engine(checkpoint) as llm:
        expected = tokens_of(llm.generate(prompts, greedy(12)))
    for lag in (0, 1):
        with engine(checkpoint, max_lag=lag) as llm:
            compute = llm._runner._model.compute_logits
            calls = []

            def poisoned(hidden, compute=compute, calls=calls):
                logits = compute(hidden)
                calls.append(1)
                if len(calls) == 5:
                    logits[1] = float("nan")
                return logits

            monkeypatch.setattr(llm._runner._model, "compute_logits", poisoned)
            outputs = [o.outputs[0] for o in llm.generate(prompts, greedy(12))]
            assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
            assert "NaN" in outputs[1].error
            assert outputs[1].token_ids == expected[1][:4]
            assert [outputs[0].token_ids, outputs[2].token_ids] == [expected[0], expected[2]]
            assert all_blocks_came_back(llm)


def test_two_engines_in_one_process_do_not_meet(checkpoint):
    first, second = prompts_of([20, 33])
    with engine(checkpoint, block_size=16) as a, engine(checkpoint, block_size=32) as b:
        streams = [a.stream(first, greedy(10)), b.stream(first, greedy(10))]
        results = [None, None]
        for _ in range(12):
            for i, stream in enumerate(streams):
                results[i] = next(stream, results[i])
        assert results[0].outputs[0].token_ids == results[1].outputs[0].token_ids
        assert tokens_of(a.generate(second, greedy(5))) == tokens_of(b.generate(second, greedy(5)))


@pytest.mark.parametrize("block_size", [1, 4, 64, 256])
def test_the_block_size_does_not_show(checkpoint, block_size):
    prompts = prompts_of([1, 20, 70])
    with engine(checkpoint) as llm:
        expected = tokens_of(llm.generate(prompts, greedy(12)))
    with engine(checkpoint, block_size=block_size, num_blocks=512) as llm:
        assert tokens_of(llm.generate(prompts, greedy(12))) == expected


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"block_size": 24}, ConfigError, "power of two"),
        ({"block_size": "16"}, ConfigError, "block_size"),
        ({"dtype": "int8"}, ConfigError, "int8"),
        ({"device": "tpu"}, ConfigError, "tpu"),
        ({"max_lag": 2}, ConfigError, "max_lag"),
        ({"memory_fraction": 0.0}, ConfigError, "memory_fraction"),
        ({"max_model_len": 100_000}, ConfigError, "256 positions"),
        ({"max_model_len": 1}, ConfigError, "at least 2"),
        ({"plugins": 5}, ConfigError, "plugins is 5"),
        ({"num_blocks": None, "memory_fraction": 1e-9}, CapacityError, "256 tokens needs 16"),
        ({"num_blocks": 2}, CapacityError, "16 KV blocks"),
        ({"load_format": "ggml"}, ConfigError, "ggml"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, ConfigError, "max_num_seqs"),
        ({"seed": 2**70}, ConfigError, "seed"),
    ],
)
def test_a_bad_setting_is_refused_in_one_line(checkpoint, settings, error, message):
    with pytest.raises(error, match=message) as caught, engine(checkpoint, **settings):
        pass
    assert "\n" not in str(caught.value)


def test_a_model_that_is_no_path_is_refused():
    with pytest.raises(ConfigError, match="model is None"):
        LLM(None)


def test_without_settings_the_context_is_what_fits_the_pool(checkpoint):
    with engine(checkpoint, max_model_len=None, num_blocks=5) as llm:
        assert llm.limits.max_model_len == 80
        (output,) = llm.generate(prompts_of([70]), greedy(50))
        assert len(output.outputs[0].token_ids) == 10


def test_dummy_weights_need_only_a_config(checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    answers = []
    for seed in (1, 1, 2):
        with engine(tmp_path, load_format="dummy", dtype="float32", seed=seed) as llm:
            answers.append(tokens_of(llm.generate(prompts_of([20]), greedy(12))))
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_with_batch_invariance_is_equal_bit_for_bit(checkpoint, dtype):
    prompts = prompts_of([1, 17, 33, 100])
    settings = {"dtype": dtype, "batch_invariant": True}
    with engine(checkpoint, **settings, enable_prefix_caching=False, max_lag=0) as llm:
        alone = [tokens_of(llm.generate(p, greedy(16)))[0] for p in prompts]
    with engine(checkpoint, **settings, max_num_batched_tokens=32, max_num_seqs=4) as llm:
        assert tokens_of(llm.generate(prompts, greedy(16))) == alone


def test_unseeded_requests_differ_and_follow_the_engine_seed(checkpoint):
    prompts = prompts_of([20]) * 3
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    answers = []
    for seed in (0, 0, 1):
        with engine(checkpoint, seed=seed) as llm:
            answers.append(tokens_of(llm.generate(prompts, params)))
    assert answers[0] == answers[1] != answers[2]
    assert len({tuple(t) for t in answers[0]}) == 3


def test_text_is_the_same_streamed_and_whole(text_checkpoint):
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=40, ignore_eos=True)
    with engine(text_checkpoint) as llm:
        (whole,) = llm.generate("a dog and", params)
        texts = [o.outputs[0].text for o in llm.stream("a dog and", params)]
        assert texts[-1] == whole.outputs[0].text
        assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
        assert whole.prompt == "a dog and"
        ids = whole.outputs[0].token_ids
        assert whole.outputs[0].text == llm.tokenizer.decode(ids)


def test_a_stop_string_ends_the_text_before_it(text_checkpoint):
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=40, ignore_eos=True)
    for lag in (0, 1):
        with engine(text_checkpoint, max_lag=lag) as llm:
            text = llm.generate("a dog and", params)[0].outputs[0].text
            stop = text[10:13]
            cut = text[: text.index(stop)]
            stopped = SamplingParams(
                temperature=1.0, seed=4, max_tokens=40, ignore_eos=True, stop=[stop]
            )
            output = llm.generate("a dog and", stopped)[0].outputs[0]
            assert output.text == cut
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)
            assert all_blocks_came_back(llm)


def test_chat_ends_at_the_end_of_turn_token(text_checkpoint, monkeypatch):
    with engine(text_checkpoint) as llm:
        end = llm.tokenizer.special_token_id("<|eot_id|>")
        compute = llm._runner._model.compute_logits
        calls = []

        def ends_third(hidden):
            logits = compute(hidden)
            calls.append(1)
            if len(calls) == 3:
                logits[:, end] = torch.inf
                logits[:, end] = logits.masked_fill(logits.isinf(), -1e9).amax(-1) + 1
            return logits

        monkeypatch.setattr(llm._runner._model, "compute_logits", ends_third)
        (output,) = llm.chat([{"role": "user", "content": "hello"}], greedy(20))
        assert output.outputs[0].finish_reason == "length"  # ignore_eos
        calls.clear()
        params = SamplingParams(temperature=0.0, max_tokens=20)
        completion = llm.chat([{"role": "user", "content": "hello"}], params)[0].outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert completion.token_ids[-1] == end
        assert "<|eot_id|>" not in completion.text


def test_several_conversations_are_answered_in_order(text_checkpoint):
    conversations = [[{"role": "user", "content": text}] for text in ("hello", "a dog")]
    with engine(text_checkpoint) as llm:
        alone = [llm.chat(c, greedy(6))[0].outputs[0].token_ids for c in conversations]
        assert tokens_of(llm.chat(conversations, greedy(6))) == alone
        with pytest.raises(RequestError):
            llm.chat([])


def test_only_requests_of_one_salt_share_prefixes_and_counts_outlive_a_new_beginning(checkpoint):
    (prompt,) = prompts_of([40])
    with engine(checkpoint) as llm:
        cached = []
        for i, salt in enumerate([None, "a", "b", "a", None]):
            llm.add_request(str(i), prompt, greedy(2), cache_salt=salt)
            cached.append(drain(llm)[str(i)].num_cached_tokens)
        assert cached == [0, 0, 0, 32, 32]
        llm._end_all("abort")
        stats = llm.stats()
        assert (stats["num_queried_tokens"], stats["num_cached_tokens"]) == (200, 64)
        assert stats["num_preemptions"] == 0
