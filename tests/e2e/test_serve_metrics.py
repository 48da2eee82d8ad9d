"""`/metrics` after known requests, and the server's own description."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.engines import save_text_model
from support.servers import MODEL, serving, wait_until
from tvr import demo
from tvr.serve import responses

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def running():
    with serving(demo.path(), {"num_blocks": 40, "max_model_len": 256}) as running:
        yield running
        wait_until(running.is_idle)


def grown(running, names, work):
    """Do `work` and return by how much each metric has grown."""
    before = [running.metric(name) for name in names]
    work()
    wait_until(running.is_idle)
    return [running.metric(name) - old for name, old in zip(names, before, strict=True)]


def test_tokens_and_times_are_counted_as_vllm_counts_them(running):
    prompt = running.llm.tokenizer.encode("ROMEO:\nO")
    body = {"model": MODEL, "prompt": [prompt] * 2, "max_tokens": 5, "ignore_eos": True}
    names = {
        "prompt_tokens_total": 2 * len(prompt),
        "generation_tokens_total": 2 * 3 * 5,
        "time_to_first_token_seconds_count": 2,
        "inter_token_latency_seconds_count": 2 * 3 * 4,
        "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
        "request_prompt_tokens_sum": 2 * len(prompt),
        "request_generation_tokens_sum": 2 * 3 * 5,
    }
    for streams in (False, True):
        asked = {**body, "n": 3, "stream": streams}
        found = grown(running, names, lambda asked=asked: running.post(COMPLETIONS, asked))
        assert dict(zip(names, found, strict=True)) == names
    assert running.metric("request_success_total", finished_reason="length") == 12
    ttft = running.metric("time_to_first_token_seconds_sum")
    assert 0 < ttft < running.metric("e2e_request_latency_seconds_sum")


def test_hits_of_the_prefix_cache_and_preemptions_are_counted(running):
    prompt = [7] * 100
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "cache_salt": "mine"}
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total")
    assert grown(running, names, lambda: running.post(COMPLETIONS, body)) == [100, 0, 0]
    assert grown(running, names, lambda: running.post(COMPLETIONS, body)) == [100, 96, 0]
    # Four sequences of 15 blocks each, and there are 40.
    crowd = {**body, "prompt": [[i] * 17 for i in range(4)], "max_tokens": 220, "ignore_eos": True}
    assert grown(running, names, lambda: running.post(COMPLETIONS, crowd))[2] > 0


def test_gauges_show_the_moment(running):
    body = {"model": MODEL, "prompt": "x", "max_tokens": 240, "ignore_eos": True, "stream": True}
    assert running.metric("num_requests_running") == 0
    assert running.metric("kv_cache_usage_perc") == 0
    sock = running.begin(COMPLETIONS, body)
    wait_until(lambda: running.metric("num_requests_running") == 1)
    assert 0 < running.metric("kv_cache_usage_perc") < 1
    assert running.metric("cache_config_info", block_size="16", num_blocks="40") == 1
    sock.close()


def test_the_page_is_prometheus_text(running):
    reply = running.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {f.name: f for f in text_string_to_metric_families(reply.body.decode())}
    assert families["tvr:prompt_tokens"].type == "counter"
    assert families["tvr:kv_cache_usage_perc"].type == "gauge"
    histogram = families["tvr:time_to_first_token_seconds"]
    counts = [s.value for s in histogram.samples if s.name.endswith("_bucket")]
    assert counts == sorted(counts)
    assert counts[-1] == running.metric("time_to_first_token_seconds_count") > 0
    assert "process_resident_memory_bytes" in families


def test_the_description_names_every_route_and_its_answers(running):
    document = running.get("/openapi.json").json
    assert document["openapi"].startswith("3.")
    routes = {(m, path) for path, item in document["paths"].items() for m in item}
    assert routes == {
        *(("post", f"/v1/{name}completions") for name in ("", "chat/")),
        *(("post", path) for path in ("/tokenize", "/detokenize")),
        ("head", "/health"),
        *(
            ("get", path)
            for path in ("/v1/models", "/v1/models/{name}", "/health", "/metrics", "/")
        ),
    }
    schemas = document["components"]["schemas"]
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert "200" in operation["responses"]
            for status, response in operation["responses"].items():
                for content in response.get("content", {}).values():
                    ref = content.get("schema", {}).get("$ref", "")
                    assert ref == "" or ref.rpartition("/")[2] in schemas, (path, status)
            if method == "post":
                ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                assert schemas[ref.rpartition("/")[2]]["additionalProperties"] is False
                assert {"400", "401", "413", "415", "429"} <= operation["responses"].keys()
    assert not any(
        "422" in o["responses"] for item in document["paths"].values() for o in item.values()
    )


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    path = save_text_model(tmp_path_factory.mktemp("model"))
    with serving(path, {"num_blocks": 64, "max_model_len": 256}) as running:
        yield running


MESSAGES = [{"role": "user", "content": "hello"}]
ASKED = {
    "Completion": (COMPLETIONS, {"prompt": "x", "logprobs": 2, "max_tokens": 2}),
    "ChatCompletion": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "max_tokens": 2},
    ),
    "Tokenized": ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    "Detokenized": ("/detokenize", {"tokens": [5]}),
    "ErrorBody": (COMPLETIONS, {"prompt": 5}),
    "ModelList": ("/v1/models", None),
    "Model": (f"/v1/models/{MODEL}", None),
    "Health": ("/health", None),
}


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_what_the_description_says(chatting, name):
    path, body = ASKED[name]
    reply = chatting.get(path) if body is None else chatting.post(path, {"model": MODEL, **body})
    assert reply.status == (400 if name == "ErrorBody" else 200), reply.body
    getattr(responses, name).model_validate(reply.json, strict=True, extra="forbid")
