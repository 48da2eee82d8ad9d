"""How a request was served must not show in its tokens (fp32, reference backend)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.engines import (
    all_blocks_came_back,
    delays,
    engine,
    greedy,
    prompts_of,
    save_shape,
    tokens_of,
)
from tvr import SamplingParams

LENGTHS = [1, 16, 17, 31, 32, 33, 48, 100]

SEEDED = [
    SamplingParams(
        temperature=0.8,
        top_p=0.95,
        top_k=20 if i % 2 else 0,
        seed=i,
        presence_penalty=0.5 if i % 3 == 0 else 0.0,
        max_tokens=24,
        ignore_eos=True,
    )
    for i in range(len(LENGTHS))
]
GREEDY = [greedy(24) for _ in LENGTHS]


def after_an_even_token_no_odd_one(output_token_ids, logits):
    if output_token_ids and output_token_ids[-1] % 2 == 0:
        logits[1::2] = -torch.inf
    return logits


#: Every other thing that changes or watches a choice, on rows beside each other.
RULES = [
    {"logit_bias": {3: 4.0, 77: -100.0}},
    {"allowed_token_ids": list(range(2, 60))},
    {"logprobs": 3},
    {"prompt_logprobs": 2, "logprobs": 0},
    {"logits_processors": [after_an_even_token_no_odd_one]},
    {"min_tokens": 24, "stop_token_ids": list(range(2, 20)), "logit_bias": {5: 3.0}},
    {"allowed_token_ids": list(range(40, 131)), "repetition_penalty": 1.3, "logprobs": 20},
    {"logits_processors": [after_an_even_token_no_odd_one], "prompt_logprobs": 0},
]
RULED = [replace(params, **rules) for params, rules in zip(SEEDED, RULES, strict=True)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(checkpoint):
    """Each prompt's tokens when served alone: one chunk, no cache, no lag."""
    prompts = prompts_of(LENGTHS)
    with engine(checkpoint, enable_prefix_caching=False, max_lag=0) as llm:
        return {
            id(params): [
                tokens_of(llm.generate(prompt, p))[0]
                for prompt, p in zip(prompts, params, strict=True)
            ]
            for params in (GREEDY, SEEDED, RULED)
        }


@pytest.fixture(params=[0, 1], ids=["lag0", "lag1"])
def lag(request, monkeypatch):
    with delays(monkeypatch):
        yield request.param


@pytest.fixture(params=[GREEDY, SEEDED, RULED], ids=["greedy", "seeded", "ruled"])
def params(request):
    return request.param


def test_a_batch_equals_its_requests_alone(checkpoint, alone, lag, params):
    with engine(checkpoint, max_lag=lag) as llm:
        assert tokens_of(llm.generate(prompts_of(LENGTHS), params)) == alone[id(params)]
        assert all_blocks_came_back(llm)


def test_chunked_prefill_equals_one_shot(checkpoint, alone, lag, params):
    with engine(checkpoint, max_lag=lag, max_num_batched_tokens=16, max_num_seqs=8) as llm:
        assert tokens_of(llm.generate(prompts_of(LENGTHS), params)) == alone[id(params)]
        assert all_blocks_came_back(llm)


def test_a_prefix_hit_equals_a_miss(checkpoint, alone, lag, params):
    with engine(checkpoint, max_lag=lag) as llm:
        first = llm.generate(prompts_of(LENGTHS), params)
        again = llm.generate(prompts_of(LENGTHS), params)
        assert tokens_of(first) == tokens_of(again) == alone[id(params)]
        assert [o.num_cached_tokens for o in first] == [0] * len(LENGTHS)
        # Whole blocks only, and always one token left to compute.
        hits = [
            0 if p.prompt_logprobs is not None else (n - 1) // 16 * 16
            for n, p in zip(LENGTHS, params, strict=True)
        ]
        assert [o.num_cached_tokens for o in again] == hits


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no_cache"])
def test_preemption_does_not_show(checkpoint, alone, lag, params, caching, monkeypatch):
    """Resumed requests recompute their tokens, and go on with counts and seeds as they were."""
    preempted = []
    with engine(
        checkpoint,
        max_lag=lag,
        num_blocks=14,
        max_model_len=128,
        enable_prefix_caching=caching,
    ) as llm:
        schedule = llm._scheduler.schedule

        def watch():
            output = schedule()
            if output is not None:
                preempted.extend(output.preempted)
            return output

        monkeypatch.setattr(llm._scheduler, "schedule", watch)
        assert tokens_of(llm.generate(prompts_of(LENGTHS), params)) == alone[id(params)]
        assert all_blocks_came_back(llm)
    assert preempted, "the pool was large enough for all; the test shows nothing"


def test_lag_shows_neither_in_text_lengths_nor_in_finish_reasons(checkpoint, lag):
    """A stop token costs one discarded step, never a wrong or an extra token."""
    (prompt,) = prompts_of([20])
    with engine(checkpoint, max_lag=lag) as llm:
        whole = llm.generate(prompt, greedy(32))[0].outputs[0].token_ids
        for count in (1, 2, 9):
            stop_id = whole[count - 1]
            if stop_id in whole[: count - 1]:
                continue
            output = llm.generate(prompt, greedy(32, stop_token_ids=[stop_id]))[0].outputs[0]
            assert output.token_ids == whole[:count]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop_id)
        assert all_blocks_came_back(llm)


def test_identical_prompts_in_one_step_get_equal_answers(checkpoint, lag):
    """GeeeekExplorer/nano-vllm#219: duplicate blocks, and a hash that outlived its block."""
    (prompt,) = prompts_of([48])
    with engine(checkpoint, max_lag=lag) as llm:
        answers = tokens_of(llm.generate([prompt] * 8, greedy(20)))
        assert answers == [answers[0]] * 8
        assert all_blocks_came_back(llm)


def test_two_equal_prompts_read_no_block_before_it_is_written(checkpoint, alone, lag):
    """ROCm/ATOM#902: the second prompt hit a hash whose block was not computed yet."""
    prompt = prompts_of([64], seed=5)[0]
    with engine(checkpoint, max_lag=lag, enable_prefix_caching=False) as llm:
        solo = tokens_of(llm.generate(prompt, greedy(12)))[0]
    with engine(checkpoint, max_lag=lag, max_num_batched_tokens=32, max_num_seqs=4) as llm:
        assert tokens_of(llm.generate([prompt, prompt], greedy(12))) == [solo, solo]


def test_prompts_that_share_a_partly_filled_block_keep_to_themselves(checkpoint, lag):
    """Only whole blocks are shared: of a common beginning of 20 tokens, 16."""
    base = prompts_of([20], seed=6)[0]
    prompts = [[*base, 7], [*base, 8]]
    with engine(checkpoint, max_lag=lag, enable_prefix_caching=False) as llm:
        cold = [tokens_of(llm.generate(p, greedy(12)))[0] for p in prompts]
    with engine(checkpoint, max_lag=lag) as llm:
        outputs = [llm.generate(p, greedy(12))[0] for p in prompts]
        assert tokens_of(outputs) == cold
        assert [o.num_cached_tokens for o in outputs] == [0, 16]


def test_n_answers_differ_repeat_and_share_the_prompt(checkpoint, lag):
    (prompt,) = prompts_of([40])
    params = SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=16, ignore_eos=True)
    single = SamplingParams(seed=7, temperature=1.0, max_tokens=16, ignore_eos=True)
    for caching in (True, False):
        with engine(checkpoint, max_lag=lag, enable_prefix_caching=caching) as llm:
            first, again = (llm.generate(prompt, params)[0] for _ in range(2))
            texts = [o.token_ids for o in first.outputs]
            assert texts == [o.token_ids for o in again.outputs]
            assert len({tuple(t) for t in texts}) == 3
            assert [o.index for o in first.outputs] == [0, 1, 2]
            assert tokens_of(llm.generate(prompt, single))[0] == texts[0]
            assert all_blocks_came_back(llm)


def test_one_abort_ends_all_n_answers(checkpoint, lag):
    (prompt,) = prompts_of([40])
    with engine(checkpoint, max_lag=lag) as llm:
        llm.add_request("x", prompt, SamplingParams(n=3, seed=7, max_tokens=100, ignore_eos=True))
        for _ in range(5):
            llm.step()
        llm.abort("x")
        (output,) = llm.step()
        assert output.finished
        assert [o.finish_reason for o in output.outputs] == ["abort"] * 3
        while llm.has_unfinished_requests():
            assert llm.step() == []
        assert all_blocks_came_back(llm)


def test_a_partial_chunk_samples_nothing(checkpoint, lag):
    """vllm-project/vllm-metal#590: a token sampled from half a prompt was kept."""
    short, long = prompts_of([8, 40])
    seeded = SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True)
    answers = []
    for chunk in (16, 64):
        with engine(checkpoint, max_lag=lag, max_num_batched_tokens=chunk, max_num_seqs=2) as llm:
            answers.append(tokens_of(llm.generate([short, long], [greedy(30), seeded])))
            assert [len(t) for t in answers[-1]] == [30, 8]
    assert answers[0] == answers[1]
