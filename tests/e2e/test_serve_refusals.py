"""Bad input over a real socket: never a 500, and never the engine's trouble."""

from __future__ import annotations

import json
import socket
from itertools import product

import pytest

from support.servers import MODEL, serving, wait_until
from tvr import demo

BODY = {"model": MODEL, "prompt": "ROMEO:", "max_tokens": 2, "temperature": 0}
COMPLETIONS = "/v1/completions"
VOCAB_SIZE = 2048


@pytest.fixture(scope="module")
def running():
    with serving(demo.path(), max_body_bytes=1 << 20) as running:
        yield running
        wait_until(running.is_idle)
        assert running.llm.last_failure is None


@pytest.fixture(autouse=True)
def _serves_the_next_one(running):
    yield
    assert running.post(COMPLETIONS, BODY).status == 200


def refused(running, status=400, path=COMPLETIONS, body=None, **fields):
    """Send a request that must be refused; return the error object."""
    reply = running.post(path, {**BODY, **fields} if body is None else body)
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/json"
    return reply.error


def raw(running, text: bytes) -> bytes:
    """Send bytes and return the answer's head and what has come of its body."""
    with socket.create_connection(running.address, timeout=30) as sock:
        sock.sendall(text)
        return sock.recv(65536)


BODIES = [
    *(b"", b"{bad", b"[]", b"null", b"5", b'"x"', b"\xff\xfe{}", b"{}", b'{"model": "small"'),
    *(b"[" * 100_000, b'{"model":' * 50_000, b'{"max_tokens": ' + b"9" * 5000 + b"}"),
    *(b'{"model": NaN}', b'{"model": "small", "prompt": "x", "temperature": Infinity}'),
    *(b'{"model": "small", "prompt": "\xed\xa0\x80"}', b"\x00", b'{"a": 1}{"b": 2}'),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:30]))
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_no_request_is_refused(running, path, body):
    refused(running, 400, path, body)


WRONG = {
    "model": [5, "", None, ["small"]],
    "prompt": [5, True, {}, [], [[]], [None], [1, "a"], [[1, 2], []], [1.5], [[1.5]], None],
    "max_tokens": ["ten", 0, -1, 1.5, True, [3], {}],
    "temperature": ["hot", -1, 999_999, 2.1, True, [1]],
    "top_p": [-1, 0, 1.5, "x"],
    "n": [0, -1, 1_000_000, 129, 1.5, "two"],
    "seed": [1 << 63, -(1 << 63) - 1, 1.5, "x"],
    "stop": [[""], ["", "x"], "", 5, [5], ["x"] * 17, "x" * 257, {"a": 1}],
    "presence_penalty": [3, -3, "x"],
    "frequency_penalty": [3, -3, "x"],
    "logit_bias": [{"x": 1}, {"5": "x"}, {"-1": 1}, {str(VOCAB_SIZE): 1}, [1], "x", {"1": True}],
    "logprobs": [-1, 21, 9_999_999, "x", True],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, {"x": 1}, [], "x"],
    "top_k": [-2, 1.5, "x"],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0, -1, 10_000],
    "min_tokens": [-1, 3],
    "stop_token_ids": [[-1], [VOCAB_SIZE], [151_645], "x", [1.5], 5],
    "allowed_token_ids": [[], [-1], [VOCAB_SIZE], "x"],
    "bad_words": [[""], [5], 5],
    "ignore_eos": ["x", 1],
    "cache_salt": ["", 5, "x" * 600],
    "best_of": [2, "x"],
    "suffix": ["x", 5],
    "user": [5],
    "response_format": [{"type": "json_object"}],
    "tools": [[{"type": "function"}]],
    "no_such_field": [1, "x" * 10_000],
    "x" * 5000: [1],
}
CASES = [(name, value) for name, values in WRONG.items() for value in values]


@pytest.mark.parametrize(
    ("name", "value"), CASES, ids=[f"{n[:20]}-{str(v)[:20]}-{i}" for i, (n, v) in enumerate(CASES)]
)
def test_a_wrong_value_is_refused_and_its_field_named(running, name, value):
    error = refused(running, **{name: value})
    assert name[:10] in error["message"]
    assert len(error["message"]) < 1000


@pytest.mark.parametrize("name", ["suffix", "best_of"])
def test_what_is_not_supported_has_a_code(running, name):
    error = refused(running, **{name: 2 if name == "best_of" else "x"})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_what_a_stream_does_not_have_is_refused_and_may_be_left_out_by_name(running):
    def ask(**options):
        return {**BODY, "stream": True, "stream_options": options}

    assert running.post(COMPLETIONS, ask(include_obfuscation=False)).status == 200
    for name in ("include_obfuscation", "no_such_option"):
        message = refused(running, body=ask(**{name: True}))["message"]
        assert f"stream_options.{name}" in message
        assert "max_tokens" not in message


@pytest.mark.parametrize(
    "prompt", [[-1], [VOCAB_SIZE], [[1, 2], [VOCAB_SIZE]], [2**70], [True, False]], ids=repr
)
def test_ids_outside_the_vocabulary_are_refused(running, prompt):
    refused(running, prompt=prompt)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(running, streams):
    """Before the first byte of a stream; and one that just fits is served."""
    error = refused(running, prompt=[5] * 1024, stream=streams)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].count("1024") == 2
    assert running.post(COMPLETIONS, {**BODY, "prompt": [5] * 1023}).status == 200
    assert "at least" in refused(running, prompt="x" * 900_000, stream=streams)["message"]
    refused(running, prompt="word " * 1200, stream=streams)


def test_an_empty_prompt_is_one_if_the_tokenizer_begins_it(running):
    for prompt in ("", [""], ["", "ROMEO:"]):
        assert running.post(COMPLETIONS, {**BODY, "prompt": prompt}).status == 200
        error = refused(running, prompt=prompt, add_special_tokens=False)
        assert "empty" in error["message"]


def test_a_limit_beyond_the_context_ends_with_it(running):
    body = {**BODY, "prompt": [5] * 1000, "max_tokens": 10**12, "ignore_eos": True}
    reply = running.post(COMPLETIONS, body).json
    assert reply["usage"]["completion_tokens"] == 24
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("text", ["\\ud800", "\\udc00 x", "\\ud83d\\ud83d\\ude00"])
def test_half_a_surrogate_pair_is_refused_wherever_it_is(running, text):
    for name in ("prompt", "model", "stop", "user", "no_such_field"):
        fields = {**BODY, name: "HERE"}
        refused(running, body=json.dumps(fields).replace("HERE", text).encode())
    whole = json.dumps({**BODY, "prompt": "\U0001f600"}).encode()
    assert b"\\ud83d\\ude00" in whole
    assert running.post(COMPLETIONS, whole).status == 200


def test_another_model_is_told_which_there_are(running):
    for path in (COMPLETIONS, "/v1/chat/completions", "/tokenize", "/detokenize"):
        rest = {"prompt": "x"} if path in (COMPLETIONS, "/tokenize") else {}
        rest = {"tokens": [5]} if path == "/detokenize" else rest
        if "chat" in path:
            rest = {"messages": [{"role": "user", "content": "x"}]}
        error = refused(running, 404, path, {"model": "no-such", **rest})
        assert MODEL in error["message"]
        assert error["code"] == "model_not_found"
    reply = running.get("/v1/models/no-such")
    assert reply.status == 404
    assert MODEL in reply.error["message"]


def test_a_model_without_a_chat_template_says_so(running):
    messages = [{"role": "user", "content": "x"}]
    error = refused(running, 400, "/v1/chat/completions", {"model": MODEL, "messages": messages})
    assert "chat template" in error["message"]


def test_nothing_left_to_choose_is_the_requests_fault(running):
    ids = running.llm.tokenizer.encode("the", add_special_tokens=False)
    error = refused(running, allowed_token_ids=ids[:1], bad_words=["the"], min_tokens=1)
    assert error["code"] == "no_token"


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""]
)
def test_a_body_of_another_type_is_refused(running, kind):
    """What a web page may send to another origin without being asked for leave."""
    data = json.dumps(BODY)
    line = "" if kind is None else f"Content-Type: {kind}\r\n"
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{line}"
    data = f"Content-Length: {len(data)}\r\n\r\n{data}"
    assert raw(running, (head + data).encode()).startswith(b"HTTP/1.1 415 ")


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_json_by_any_spelling_is_taken(running, kind):
    assert running.post(COMPLETIONS, BODY, headers={"Content-Type": kind}).status == 200


@pytest.mark.parametrize("bias", [100.5, -101, 1e300])
def test_a_bias_beyond_openais_limit_is_refused_and_not_cut(running, bias):
    for given in (bias, 100, -100):
        reply = running.post(COMPLETIONS, {**BODY, "logit_bias": {"5": 1, "300": given}})
        assert reply.status == (400 if given == bias else 200)
        if given == bias:
            assert reply.error["param"] == "logit_bias"
            assert f"from -100 to 100, and token 300 has {bias}" in reply.error["message"]


def test_another_method_or_route_is_an_error_object_too(running):
    assert running.get(COMPLETIONS).status == 405
    assert running.get(COMPLETIONS).headers["allow"] == "POST"
    assert running.post("/health", {}).status == 405
    for path in ("/v1", "/v1/completions/", "//v1/completions", "/V1/completions", "/docs", "/%00"):
        reply = running.post(path, BODY)
        assert reply.status in (404, 405)
        assert reply.error["type"] == "invalid_request_error"
    for path in ("/a%0Ab", "/" + "x" * 9999):
        reply = running.get(path)
        assert reply.status == 404
        assert len(reply.error["message"]) < 300
    assert "access-control-allow-origin" not in running.get("/health").headers


def test_a_body_over_the_limit_is_refused_and_read_to_its_end(running):
    data = b'{"prompt": "' + b"x" * (20 << 20) + b'"}'
    error = refused(running, 413, body=data)
    assert str(1 << 20) in error["message"]
    pieces = b"".join(b"10000\r\n" + b"x" * 65536 + b"\r\n" for _ in range(32)) + b"0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = raw(running, head + b"Transfer-Encoding: chunked\r\n\r\n" + pieces)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_what_is_no_http_is_refused(running):
    for text in (b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00" * 20):
        assert raw(running, text + b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_tokenize_takes_one_of_a_text_and_a_conversation(running):
    messages = [{"role": "user", "content": "x"}]
    bodies = [{}, {"prompt": "x", "messages": messages}, {"prompt": ["x"]}, {"prompt": 5}]
    bodies.append({"prompt": "x", "add_generation_prompt": True})
    bodies.append({"messages": messages, "add_special_tokens": True})
    for body in bodies:
        refused(running, 400, "/tokenize", body)
    for tokens in ([-1], [VOCAB_SIZE], ["x"], [1.5], "x", None, [True]):
        refused(running, 400, "/detokenize", {"tokens": tokens})


def test_lists_of_millions_of_wrong_items_are_refused_at_once(running):
    """Pydantic would describe each of them, for each form that the field may have."""
    for name, item in product(("prompt", "stop_token_ids", "stop", "bad_words"), ("1.5", "{}")):
        data = json.dumps({**BODY, name: "HERE"}).replace('"HERE"', f"[{item}{',1.5' * 200_000}]")
        error = refused(running, body=data.encode())
        assert len(error["message"]) < 1000


def test_json_is_refused_however_deep_it_is(running):
    """What looks for half pairs goes less deep than the parser."""
    for depth in range(960, 1010):
        lists = "[" * depth + "]" * depth
        refused(running, body=b'{"user": "\\ud83d\\ude00", "x": %b}' % lists.encode())


@pytest.mark.parametrize("depth", [400, 800, 950])
def test_variables_for_a_template_are_refused_where_they_are_too_deep(running, depth):
    messages = [{"role": "user", "content": "Hi"}]
    deep = "[" * depth + "]" * depth
    data = json.dumps({"messages": messages, "chat_template_kwargs": {"a": "HERE"}})
    refused(running, path="/tokenize", body=data.replace('"HERE"', deep).encode())


def test_a_wrong_part_of_a_message_is_told_in_short(running):
    for wrong in ({"type": "text", "text": [0] * 9999}, {"type": [0] * 9999}):
        messages = [{"role": "user", "content": [wrong]}]
        error = refused(running, path="/tokenize", body={"messages": messages})
        assert "messages[0]" in error["message"]
        assert len(error["message"]) < 1000


def test_an_unknown_field_of_a_message_is_told_in_one_line(running):
    messages = [{"role": "user", "content": "x", "two\nlines": 1}]
    error = refused(running, path="/tokenize", body={"messages": messages})
    assert "messages[0]['two\\nlines']" in error["message"]
