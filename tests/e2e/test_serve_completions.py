"""`/v1/completions` by OpenAI's own client, held against the engine itself."""

from __future__ import annotations

import pytest

from support.servers import MODEL, events_of, serving, wait_until
from tvr import SamplingParams, demo

PROMPT = "ROMEO:\n"
PROMPTS = [PROMPT, "JULIET:\nO", "First Citizen:\nBefore we"]


@pytest.fixture(scope="module")
def running():
    with serving(demo.path()) as running:
        yield running
        wait_until(running.is_idle)


@pytest.fixture(scope="module")
def client(running):
    with running.openai() as client:
        yield client


def offline(running, prompt, **params):
    """Return what the engine itself answers; its thread is idle between requests."""
    (output,) = running.llm.generate([prompt], SamplingParams(**params))
    return output


def ask(client, prompt=PROMPT, **fields):
    return client.completions.create(model=MODEL, prompt=prompt, **fields)


FIELDS = {
    "greedy": {"temperature": 0, "max_tokens": 24},
    "seeded": {"temperature": 0.9, "seed": 7, "max_tokens": 24, "top_p": 0.9},
    "penalised": {
        "temperature": 0,
        "max_tokens": 24,
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
    },
    "biased": {"temperature": 0, "max_tokens": 8, "logit_bias": {"300": 100}},
    "stopped": {"temperature": 0, "max_tokens": 60, "stop": ["the", ","]},
    "by default": {"seed": 1},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_an_answer_is_the_engines_own(running, client, fields, streams):
    own = offline(running, PROMPT, **fields)
    (expected,) = own.outputs
    if not streams:
        answer = ask(client, **fields)
        (choice,) = answer.choices
        text, reason, usage = choice.text, choice.finish_reason, answer.usage
        assert choice.stop_reason == expected.stop_reason
    else:
        chunks = list(ask(client, **fields, stream=True, stream_options={"include_usage": True}))
        *others, last = chunks
        assert last.choices == []
        assert {chunk.usage for chunk in others} == {None}
        assert len({(c.id, c.created, c.object, c.model) for c in chunks}) == 1
        text = "".join(chunk.choices[0].text for chunk in others)
        reasons = [chunk.choices[0].finish_reason for chunk in others]
        assert set(reasons[:-1]) <= {None}
        reason, usage = reasons[-1], last.usage
    assert (text, reason) == (expected.text, expected.finish_reason)
    assert usage.prompt_tokens == len(own.prompt_token_ids)
    assert usage.completion_tokens == len(expected.token_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_ends_by_done_and_has_usage_only_if_asked_for(running):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "stream": True, "temperature": 0}
    reply = running.post("/v1/completions", body)
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_of(reply.body)
    assert done == "[DONE]"
    assert 1 <= len(chunks) <= 4  # a chunk a token, unless the machine is too busy
    assert not any("usage" in chunk for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = running.post("/v1/completions", {**body, "stream_options": options})
    *chunks, last, done = events_of(reply.body)
    counts = [c["usage"]["completion_tokens"] for c in [*chunks, last]]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-2:] == [4, 4]


def test_several_prompts_and_answers_come_in_order(running, client):
    fields = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "n": 2}
    expected = [out.text for p in PROMPTS for out in offline(running, p, **fields).outputs]
    answer = ask(client, PROMPTS, **fields)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) == 6
    assert answer.usage.completion_tokens == 6 * 12
    assert answer.usage.prompt_tokens == sum(
        len(offline(running, p, max_tokens=1).prompt_token_ids) for p in PROMPTS
    )
    texts = [""] * 6
    for chunk in ask(client, PROMPTS, **fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


def test_token_ids_are_a_prompt_like_their_text(running, client):
    fields = {"temperature": 0, "max_tokens": 12}
    ids = [running.llm.tokenizer.encode(p) for p in PROMPTS]
    texts = [choice.text for choice in ask(client, PROMPTS, **fields).choices]
    assert [choice.text for choice in ask(client, ids, **fields).choices] == texts
    assert ask(client, ids[1], **fields).choices[0].text == texts[1]


def test_the_same_seed_gives_the_same_answer_and_no_seed_another(client):
    fields = {"temperature": 1.2, "max_tokens": 16}
    seeded = {ask(client, **fields, seed=5).choices[0].text for _ in range(3)}
    free = {ask(client, **fields).choices[0].text for _ in range(3)}
    assert len(seeded) == 1
    assert len(free) == 3


def test_a_stop_string_never_leaks_from_a_stream(client):
    whole = ask(client, temperature=0, max_tokens=40).choices[0].text
    stop = whole[15:21]
    chunks = list(ask(client, temperature=0, max_tokens=40, stop=stop, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].choices[0].stop_reason == stop


@pytest.mark.parametrize("num_top", [0, 3])
def test_logprobs_are_the_engines_own(running, client, num_top):
    fields = {"temperature": 0, "max_tokens": 6, "logprobs": num_top}
    expected = offline(running, PROMPT, **fields).outputs[0]
    logprobs = ask(client, **fields).choices[0].logprobs
    pairs = zip(expected.token_ids, expected.logprobs, strict=True)
    own = [entry[token].logprob for token, entry in pairs]
    assert logprobs.token_logprobs == pytest.approx(own, abs=1e-5)
    assert "".join(logprobs.tokens) == expected.text
    assert [len(top) for top in logprobs.top_logprobs] == [max(num_top, 1)] * 6
    for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True):
        assert expected.text[offset : offset + len(token)] == token
    parts = [c.choices[0].logprobs for c in ask(client, **fields, stream=True)]
    assert [t for part in parts for t in part.tokens] == logprobs.tokens
    assert [o for part in parts for o in part.text_offset] == logprobs.text_offset


def test_an_echo_begins_with_the_prompt_and_scores_it(running, client):
    fields = {"temperature": 0, "max_tokens": 3}
    own = offline(running, PROMPT, prompt_logprobs=2, logprobs=2, **fields)
    for streams in (False, True):
        given = ask(client, **fields, echo=True, logprobs=2, stream=streams)
        choices = [c.choices[0] for c in given] if streams else given.choices
        assert "".join(c.text for c in choices) == PROMPT + own.outputs[0].text
        scores = [s for c in choices for s in c.logprobs.token_logprobs]
        assert scores[0] is None
        prompt = zip(own.prompt_token_ids[1:], own.prompt_logprobs[1:], strict=True)
        answer = zip(own.outputs[0].token_ids, own.outputs[0].logprobs, strict=True)
        expected = [entry[t].logprob for t, entry in [*prompt, *answer]]
        assert scores[1:] == pytest.approx(expected, abs=1e-4)
    ids = running.llm.tokenizer.encode(PROMPT, add_special_tokens=False)
    echoed = ask(client, ids, **fields, echo=True).choices[0]
    assert echoed.text.startswith(PROMPT)
    assert echoed.logprobs is None


def test_vllms_fields_come_through_extra_body(running, client):
    more = {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.3, "ignore_eos": True}
    fields = {"temperature": 0.9, "seed": 4, "max_tokens": 16}
    expected = offline(running, PROMPT, **fields, **more).outputs[0].text
    assert ask(client, **fields, extra_body=more).choices[0].text == expected
    only = {"allowed_token_ids": [300, 301], "min_tokens": 2}
    text = ask(client, **fields, extra_body=only).choices[0].text
    assert text == running.llm.tokenizer.decode(
        offline(running, PROMPT, **fields, **only).outputs[0].token_ids
    )


def test_null_is_the_default_and_a_user_has_no_effect(running):
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 5}
    plain = running.post("/v1/completions", body).json["choices"]
    nulls = {"n": None, "stop": None, "logprobs": None, "stream": None, "suffix": None}
    neutral = {"suffix": "", "best_of": 1, "user": "me"}
    assert running.post("/v1/completions", {**body, **nulls}).json["choices"] == plain
    assert running.post("/v1/completions", {**body, **neutral}).json["choices"] == plain


def test_models_are_exactly_the_names_that_are_accepted(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, 1024)
    assert client.models.retrieve(MODEL).id == MODEL


def test_tokens_and_text_are_each_others(running):
    said = running.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True}).json
    assert said["tokens"] == running.llm.tokenizer.encode(PROMPT)
    assert said["count"] == len(said["tokens"]) == len(said["token_strs"])
    assert said["max_model_len"] == 1024
    plain = running.post("/tokenize", {"prompt": PROMPT, "add_special_tokens": False}).json
    assert running.post("/detokenize", {"tokens": plain["tokens"]}).json == {"prompt": PROMPT}
    assert running.post("/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_salts_keep_the_prefix_caches_of_tenants_apart(running, client):
    prompt = "And so it came to pass, " * 12
    cached = []
    for salt in ("a", "b", "a"):
        usage = ask(client, prompt, max_tokens=1, extra_body={"cache_salt": salt}).usage
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[:2] == [0, 0]
    assert cached[2] > 16
