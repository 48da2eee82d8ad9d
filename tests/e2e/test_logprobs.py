"""Log-probabilities, logits processors and rules of sampling through the whole engine."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
import transformers

from support.engines import (
    all_blocks_came_back,
    delays,
    engine,
    greedy,
    prompts_of,
    save_shape,
    save_text_model,
    tokens_of,
)
from tvr import SamplingParams
from tvr.core.runner import ModelRunner
from tvr.core.step_extras import NO_EXTRAS
from tvr.errors import RequestError

LENGTHS = [1, 2, 16, 17, 33, 70]

#: Two fp32 computations of the same logits, of size up to 30, in different orders of summing.
LIMIT = 1e-3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(checkpoint):
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module")
def text_checkpoint(tmp_path_factory):
    return save_text_model(tmp_path_factory.mktemp("text"))


@pytest.fixture(params=[0, 1], ids=["lag0", "lag1"])
def lag(request, monkeypatch):
    with delays(monkeypatch):
        yield request.param


def watch_op(llm, look):
    """Let `look` see the logits of every call of `top_logprobs`."""
    step_ops = llm._runner._step_ops

    def run(logits, tokens, **room):
        look(logits)
        return step_ops.top_logprobs(logits, tokens, **room)

    llm._runner._step_ops = step_ops._replace(top_logprobs=run)


@torch.no_grad()
def reference_logprobs(reference, tokens):
    """Return transformers' log-softmax [len(tokens), vocab] in fp64."""
    return reference(torch.tensor([tokens])).logits[0].double().log_softmax(dim=-1)


def check_position(given, token, row, num_top):
    """Compare one position's dict with the reference's row [vocab]."""
    assert next(iter(given)) == token
    assert num_top <= len(given) <= num_top + 1
    for token_id, logprob in given.items():
        assert logprob.logprob == pytest.approx(row[token_id].item(), abs=LIMIT)
        assert logprob.rank == 1 + (row > row[token_id]).sum().item()
    ranks = sorted(logprob.rank for logprob in given.values())
    assert ranks[:num_top] == list(range(1, num_top + 1))


@pytest.mark.parametrize("chunk", [512, 32])
def test_logprobs_are_transformers_log_softmax(checkpoint, reference, lag, chunk):
    """Whatever is asked of sampling, they are the model's own."""
    prompts = prompts_of(LENGTHS)
    params = [
        SamplingParams(
            logprobs=k,
            prompt_logprobs=k,
            seed=k,
            max_tokens=6,
            ignore_eos=True,
            temperature=0.5 * (k % 3),
            repetition_penalty=1.5,
            logit_bias={3: 2.0},
            top_k=50,
        )
        for k in (0, 1, 2, 5, 20, 3)
    ]
    with engine(checkpoint, max_lag=lag, max_num_batched_tokens=chunk, max_num_seqs=8) as llm:
        outputs = llm.generate([*prompts, prompts[3]], [*params, greedy(6)])
        assert all_blocks_came_back(llm)
    plain = outputs.pop()
    assert plain.prompt_logprobs is plain.outputs[0].logprobs is None
    assert plain.outputs[0].cumulative_logprob is None
    for prompt, asked, output in zip(prompts, params, outputs, strict=True):
        answer = output.outputs[0]
        rows = reference_logprobs(reference, prompt + answer.token_ids)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        assert len(answer.logprobs) == len(answer.token_ids) == 6
        for position in range(1, len(prompt) + 6):
            if position < len(prompt):
                token, given = prompt[position], output.prompt_logprobs[position]
            else:
                at = position - len(prompt)
                token, given = answer.token_ids[at], answer.logprobs[at]
            check_position(given, token, rows[position - 1], asked.logprobs)
        total = sum(d[t].logprob for d, t in zip(answer.logprobs, answer.token_ids, strict=True))
        assert answer.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_take_nothing_from_the_cache_and_leave_it_to_others(checkpoint, lag):
    (prompt,) = prompts_of([50])
    asked = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    with engine(checkpoint, max_lag=lag) as llm:
        first, again = (llm.generate(prompt, asked)[0] for _ in range(2))
        plain = llm.generate(prompt, greedy(3))[0]
        assert first.num_cached_tokens == again.num_cached_tokens == 0
        assert plain.num_cached_tokens == 48
        assert first.prompt_logprobs == again.prompt_logprobs
        assert tokens_of([first, again, plain]) == [plain.outputs[0].token_ids] * 3


def test_prompt_logprobs_are_computed_a_few_rows_at_a_time(checkpoint, monkeypatch):
    """All at once, a long prompt's logits would take more memory than everything else."""
    (prompt,) = prompts_of([200])
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    made, judged = [], []
    with engine(checkpoint, max_num_seqs=8) as llm:
        compute = llm._runner._model.compute_logits
        watch_op(llm, lambda logits: judged.append(len(logits)))
        monkeypatch.setattr(
            llm._runner._model,
            "compute_logits",
            lambda hidden: (made.append(len(hidden)), compute(hidden))[1],
        )
        (output,) = llm.generate(prompt, asked)
    assert made == [64, 64, 64, 7, 1]
    assert judged == [8] * 24 + [7]  # the op takes as many as there may be sequences
    assert len(output.prompt_logprobs) == 200


@pytest.mark.parametrize(("num_asking", "rows"), [(1, {1}), (2, {2}), (3, {8}), (8, {8})])
def test_of_few_among_many_rows_the_logits_are_gathered(checkpoint, lag, num_asking, rows):
    """Whichever rows the op was given, each request has its own."""
    prompts = prompts_of([20, 30, 17, 25, 40, 9, 12, 33])
    params = [greedy(6, logprobs=i if i >= 8 - num_asking else None) for i in range(8)]
    with engine(checkpoint, max_lag=lag, max_num_seqs=8) as llm:
        alone = [llm.generate(p, q)[0].outputs[0] for p, q in zip(prompts, params, strict=True)]
        judged = set()
        watch_op(llm, lambda logits: judged.add(len(logits)))
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    assert judged == rows
    for i, (found, wanted) in enumerate(zip(outputs, alone, strict=True)):
        assert found.token_ids == wanted.token_ids
        if params[i].logprobs is None:
            assert found.logprobs is wanted.logprobs is None
            continue
        assert [d.keys() for d in found.logprobs] == [d.keys() for d in wanted.logprobs]
        assert all(i <= len(d) <= i + 1 for d in found.logprobs)
        assert found.cumulative_logprob == pytest.approx(wanted.cumulative_logprob, abs=LIMIT)


def test_a_preempted_prompt_gives_its_logprobs_once(checkpoint, lag, monkeypatch):
    """Decodes push a long prompt out halfway; it comes again from its beginning."""
    short = prompts_of([30, 30], seed=1)
    (long,) = prompts_of([100], seed=2)
    asked = SamplingParams(
        temperature=0, max_tokens=8, prompt_logprobs=2, logprobs=1, ignore_eos=True
    )
    settings = {"max_lag": lag, "max_num_batched_tokens": 4, "max_num_seqs": 4}
    with engine(checkpoint, **settings) as llm:
        (alone,) = llm.generate(long, asked)
    halfway = []
    with engine(checkpoint, num_blocks=15, max_model_len=128, **settings) as llm:
        schedule = llm._scheduler.schedule

        def watch():
            output = schedule()
            if output is not None:
                sequences = [llm._completions[i][1].sequence for i in output.preempted]
                halfway.extend(s for s in sequences if len(s.token_ids) == 100)
            return output

        monkeypatch.setattr(llm._scheduler, "schedule", watch)
        *_, output = llm.generate([*short, long], [greedy(60), greedy(60), asked])
        assert all_blocks_came_back(llm)
    assert halfway
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    for given, expected in zip(output.prompt_logprobs[1:], alone.prompt_logprobs[1:], strict=True):
        assert given.keys() == expected.keys()
        for token_id, logprob in given.items():
            assert logprob.logprob == pytest.approx(expected[token_id].logprob, abs=LIMIT)
    assert len(output.outputs[0].logprobs) == 8


def test_n_answers_have_logprobs_each_and_the_prompts_once(checkpoint, lag):
    (prompt,) = prompts_of([40])
    params = SamplingParams(n=3, seed=1, logprobs=2, prompt_logprobs=0, max_tokens=5)
    with engine(checkpoint, max_lag=lag) as llm:
        (output,) = llm.generate(prompt, params)
    assert len(output.prompt_logprobs) == 40
    for answer in output.outputs:
        assert [t in d for d, t in zip(answer.logprobs, answer.token_ids, strict=True)] == [
            True
        ] * len(answer.token_ids)


def test_an_id_taken_again_gets_no_prompt_logprobs_of_the_aborted_request(checkpoint):
    first, second = prompts_of([100, 20])
    asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with engine(checkpoint, max_num_batched_tokens=16, max_num_seqs=2) as llm:
        (alone,) = llm.generate(second, asked)
        llm.add_request("x", first, asked)
        llm.step()
        llm.abort("x")
        llm.step()
        llm.add_request("x", second, asked)
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert outputs[-1].prompt_logprobs == alone.prompt_logprobs
        assert not llm._special


def test_the_text_of_a_token_is_that_inside_a_text(text_checkpoint):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=0)
    with engine(text_checkpoint) as llm:
        (output,) = llm.generate("once more unto the breach", params)
        texts = [
            d[t].decoded_token
            for d, t in zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        ]
        assert "".join(texts) == "once more unto the breach"
        named = [(i, p.decoded_token) for d in output.outputs[0].logprobs for i, p in d.items()]
        assert all(isinstance(piece, str) for _, piece in named)
        # They are made once, for all requests.
        assert dict(named).items() <= llm.tokenizer.decoding.texts.items()


def test_minus_infinity_is_a_floor_that_json_can_say(checkpoint, monkeypatch):
    """sgl-project/sglang#4097, vllm-project/vllm#10234."""
    (prompt,) = prompts_of([10])
    with engine(checkpoint) as llm:
        compute = llm._runner._model.compute_logits

        def two_tokens(hidden):
            logits = compute(hidden)
            logits[:, 2:] = -math.inf
            return logits

        monkeypatch.setattr(llm._runner._model, "compute_logits", two_tokens)
        params = SamplingParams(top_k=1, logprobs=5, prompt_logprobs=5, max_tokens=3)
        (output,) = llm.generate(prompt, params)
        answer = output.outputs[0]
        assert len(answer.logprobs[0]) == 5
        assert min(p.logprob for p in answer.logprobs[0].values()) == -9999.0
        assert output.prompt_logprobs[1][prompt[1]].logprob == -9999.0
        json.dumps([answer.logprobs, output.prompt_logprobs], allow_nan=False)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_the_limit_are_refused(field):
    """sgl-project/sglang#40099: such a number ended the scheduler."""
    for count in (9_999_999, 21, -1):
        with pytest.raises(RequestError, match=f"{field} is {count}; .* 0 to 20"):
            SamplingParams(**{field: count})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {191222: -100}}, "logit_bias holds 191222"),
        ({"allowed_token_ids": [3, 131]}, "allowed_token_ids holds 131"),
        ({"stop_token_ids": [151645]}, "stop_token_ids holds 151645"),
        ({"bad_words": ["x"]}, "bad_words need a tokenizer"),
    ],
)
def test_ids_that_the_model_has_not_are_refused_and_others_served(checkpoint, fields, message):
    prompts = prompts_of([20, 30])
    with engine(checkpoint) as llm:
        expected = tokens_of(llm.generate(prompts, greedy(8)))
        llm.add_request("a", prompts[0], greedy(8))
        llm.step()
        with pytest.raises(RequestError, match=message):
            llm.add_request("b", prompts[1], greedy(8, **fields))
        llm.add_request("c", prompts[1], greedy(8))
        seen = {}
        while llm.has_unfinished_requests():
            seen.update({o.request_id: o for o in llm.step()})
        assert tokens_of([seen["a"], seen["c"]]) == expected


def test_a_request_that_allows_no_token_ends_with_an_error_alone(checkpoint, lag):
    """huggingface/transformers#21435."""
    prompts = prompts_of([20, 30, 17])
    with engine(checkpoint, max_lag=lag) as llm:
        expected = tokens_of(llm.generate(prompts, greedy(8)))
        nothing = greedy(8, logits_processors=[lambda ids, logits: logits - math.inf])
        outputs = [o.outputs[0] for o in llm.generate(prompts, [greedy(8), nothing, greedy(8)])]
        assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
        assert "allow no token" in outputs[1].error
        assert [outputs[0].token_ids, outputs[2].token_ids] == [expected[0], expected[2]]
        assert all_blocks_came_back(llm)


def test_a_processor_sees_every_token_and_decides_the_next(checkpoint, lag):
    prompts = prompts_of([20, 33])
    seen = []

    def count_up(output_token_ids, logits):
        seen.append(list(output_token_ids))
        logits[:] = -math.inf
        logits[10 + len(output_token_ids)] = 0.0
        return logits

    def shift(output_token_ids, logits):
        return logits.roll(1)

    with engine(checkpoint, max_lag=lag) as llm:
        expected = tokens_of(llm.generate(prompts[1], greedy(12)))[0]
        asked = SamplingParams(
            max_tokens=5, ignore_eos=True, logits_processors=[count_up, shift], logprobs=1
        )
        outputs = llm.generate(prompts, [asked, greedy(12)])
        assert tokens_of(outputs) == [[11, 12, 13, 14, 15], expected]
        assert seen == [list(range(11, 11 + n)) for n in range(5)]
        # What the model itself finds likely is something else.
        assert outputs[0].outputs[0].cumulative_logprob < -1
        assert not llm._special


def test_a_processor_may_give_a_number_past_the_largest_of_the_models_dtype(checkpoint, lag):
    """In float16 it once became infinity, and the request failed."""

    def only_twelve(output_token_ids, logits):
        logits[12] = 1e9
        return logits

    def all_but_twelve(output_token_ids, logits):
        logits[12] = -torch.inf
        return logits

    with engine(checkpoint, max_lag=lag, dtype="float16") as llm:
        asked = [greedy(3, logits_processors=[only_twelve])]
        asked.append(greedy(3, logits_processors=[only_twelve, all_but_twelve]))
        first, second = tokens_of(llm.generate(prompts_of([20, 20]), asked))
        assert first == [12, 12, 12]
        assert len(second) == 3
        assert 12 not in second


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda ids, logits: 1 / 0, "a logits processor failed: ZeroDivisionError"),
        (lambda ids, logits: logits[:5], r"shape \[131\], not \[5\]"),
        (lambda ids, logits: None, "NoneType"),
        (lambda ids, logits: sys.exit(3), "a logits processor failed: SystemExit: 3"),
    ],
)
def test_a_failing_processor_ends_its_request_alone(checkpoint, lag, processor, message):
    prompts = prompts_of([20, 33])
    with engine(checkpoint, max_lag=lag) as llm:
        expected = tokens_of(llm.generate(prompts, greedy(8)))
        bad = greedy(8, logits_processors=[processor])
        first, second = (o.outputs[0] for o in llm.generate(prompts, [bad, greedy(8)]))
        assert first.finish_reason == "error"
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(first.error)
        assert second.token_ids == expected[1]
        assert all_blocks_came_back(llm)


def test_only_what_is_asked_for_is_computed(checkpoint, monkeypatch):
    def never(logits):
        raise AssertionError("nobody asked for this")

    extras = []
    submit = ModelRunner.submit
    monkeypatch.setattr(
        ModelRunner, "submit", lambda self, *a: (extras.append(a[2]), submit(self, *a))[1]
    )
    with engine(checkpoint) as llm:
        watch_op(llm, never)
        llm.generate(prompts_of([20, 33]), greedy(8, logit_bias={3: 1.0}))
    assert extras
    assert all(e is NO_EXTRAS for e in extras)


def test_allowed_ids_and_bias_decide_what_is_generated(checkpoint, lag):
    (prompt,) = prompts_of([20])
    with engine(checkpoint, max_lag=lag) as llm:
        allowed = SamplingParams(
            temperature=5.0, seed=0, max_tokens=40, allowed_token_ids=[7, 8, 99], ignore_eos=True
        )
        assert set(tokens_of(llm.generate(prompt, allowed))[0]) == {7, 8, 99}
        pushed = greedy(5, logit_bias={42: 1000})
        assert tokens_of(llm.generate(prompt, pushed)) == [[42] * 5]
        plain = tokens_of(llm.generate(prompt, greedy(5)))[0]
        away = greedy(5, logit_bias={plain[0]: -math.inf})
        assert tokens_of(llm.generate(prompt, away))[0][0] != plain[0]


def test_bad_words_are_not_generated(text_checkpoint, lag):
    with engine(text_checkpoint, max_lag=lag) as llm:
        tokenizer = llm.tokenizer
        prompt = "once more unto the breach"

        def texts(words):
            params = SamplingParams(
                seed=3, max_tokens=60, bad_words=words, ignore_eos=True, temperature=0.7
            )
            return llm.generate(prompt, params)[0].outputs[0].token_ids

        plain = texts(None)
        # A word of one token, and one of several out of the plain output.
        words = []
        for start in range(len(plain) - 3):
            word = tokenizer.decode(plain[start : start + 3])
            if tokenizer.encode(word, add_special_tokens=False) == plain[start : start + 3]:
                words.append(word)
        assert words, "the output has no word of several tokens; choose another seed"
        banned = tokenizer.encode(words[0].lstrip(), add_special_tokens=False)
        given = texts([words[0]])
        assert given != plain
        spellings = [banned, tokenizer.encode(f" {words[0].lstrip()}", add_special_tokens=False)]
        for ids in spellings:
            assert all(given[i : i + len(ids)] != ids for i in range(len(given)))


def test_times_are_in_order(checkpoint):
    with engine(checkpoint) as llm:
        (output,) = llm.generate(prompts_of([20]), greedy(3))
    m = output.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
