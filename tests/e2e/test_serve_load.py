"""Many clients, clients that leave, a full queue: the server stays awake and keeps nothing."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection

import pytest

from support.servers import MODEL, events_of, serving, wait_until
from tvr import SamplingParams, demo
from tvr.core.tokenizer import Tokenizer
from tvr.serve import body, protocol

COMPLETIONS = "/v1/completions"
LONG = {"model": MODEL, "prompt": "ROMEO:", "max_tokens": 900, "temperature": 1, "ignore_eos": True}
ROWS, WAITING = 4, 4


@pytest.fixture(scope="module")
def running():
    engine = {"max_num_seqs": ROWS, "num_blocks": 200}
    with serving(demo.path(), engine, max_waiting=WAITING, max_body_bytes=32 << 20) as running:
        yield running


@pytest.fixture
def begin(running):
    """`Running.begin`, whose clients all leave at the end."""
    with ExitStack() as socks:
        yield lambda **fields: socks.enter_context(running.begin(COMPLETIONS, {**LONG, **fields}))


@pytest.fixture(autouse=True)
def _leaves_nothing(running):
    yield
    wait_until(running.is_idle)


def health_times(running, busy) -> list[float]:
    """Ask for health as long as `busy` says, at least 20 times; return the seconds it took."""
    times = []
    while busy() or len(times) < 20:
        began = time.perf_counter()
        assert running.get("/health").status == 200
        times.append(time.perf_counter() - began)
        time.sleep(0.01)
    return times


def test_health_answers_under_long_prefills(running):
    """It waited for a token of the engine's in another server (sgl-project/sglang#22511)."""
    prompts = [[5 + i] * 1000 for i in range(8)]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 8, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(running.post, COMPLETIONS, body)
        times = health_times(running, lambda: not reply.done())
        assert reply.result().status == 200
    assert statistics.median(times) < 0.1
    assert max(times) < 0.5


@pytest.mark.parametrize("size", [20, 40], ids=["20 MB", "over the limit"])
def test_a_huge_prompt_that_is_refused_delays_nobody(running, size):
    data = b'{"model": "small", "prompt": "' + b"word " * (size * 200_000) + b'"}'
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(running.post, COMPLETIONS, data)
        times = health_times(running, lambda: not reply.done())
        assert reply.result().status == (400 if size == 20 else 413)
    assert max(times) < 0.5


@pytest.mark.parametrize("part", [b"[]", b"{}", b'""', b'[""]', b"1", b'{"a":1}', b'"\\"",[]'])
def test_json_of_millions_of_parts_delays_nobody(running, part):
    """The parser keeps Python's lock: seconds for lists, which garbage collections go through."""
    data = b'{"model": "small", "prompt": [' + b",".join([part] * (8_000_000 // len(part))) + b"]}"
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(running.post, COMPLETIONS, data)
        times = health_times(running, lambda: not reply.done())
        assert reply.result().status == 400
    assert max(times) < 0.5


def test_a_long_text_that_is_tokenised_delays_nobody(running):
    body = {"prompt": "a " * 1_000_000, "return_token_strs": True}
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(running.post, "/tokenize", body)
        times = health_times(running, lambda: not reply.done())
        answer = reply.result().json
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 1_000_000
    assert answer["tokens"] == running.llm.tokenizer.encode(body["prompt"])
    assert max(times) < 0.5


def test_text_may_have_any_number_of_brackets_and_quotes(running):
    prompt = '[{"' * 100_000
    error = running.post(COMPLETIONS, {"model": MODEL, "prompt": prompt}).error
    assert error["code"] == "context_length_exceeded"


def test_a_full_queue_refuses_and_says_when_to_come_again(running, begin):
    socks = [begin(stream=True) for _ in range(ROWS + WAITING)]
    wait_until(lambda: running.service.admission.taken == ROWS + WAITING)
    for path in (COMPLETIONS, "/v1/chat/completions"):
        reply = running.post(path, LONG)
        assert reply.status == 429
        assert reply.headers["retry-after"] == "1"
        assert reply.error["code"] == "queue_full"
    assert running.get("/health").status == 200
    wait_until(lambda: running.metric("num_requests_waiting") >= 1)
    socks.pop().close()
    wait_until(lambda: running.service.admission.taken < ROWS + WAITING)
    short = {**LONG, "max_tokens": 1}
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(running.post, COMPLETIONS, short)
        for sock in socks:
            sock.close()
        assert reply.result().status == 200


@pytest.mark.parametrize("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"])
def test_a_head_that_does_not_come_is_not_waited_for(running, monkeypatch, sent):
    monkeypatch.setattr(protocol, "_PATIENCE_S", 0.2)
    with socket.create_connection(running.address, timeout=30) as sock:
        sock.sendall(sent)
        assert sock.recv(100) == b""


def test_a_long_answer_is_no_head_that_does_not_come(running, monkeypatch):
    monkeypatch.setattr(protocol, "_PATIENCE_S", 0.01)
    reply = running.post(COMPLETIONS, {**LONG, "max_tokens": 200})
    assert reply.status == 200


def half_a_body(running, size=100):
    """Begin a request and send one byte less than its body."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sock = socket.create_connection(running.address, timeout=30)
    sock.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode() + b"x" * (size - 1))
    return sock


def test_a_body_that_does_not_come_is_not_waited_for(running, monkeypatch):
    monkeypatch.setattr(body, "_PATIENCE_S", 0.2)
    with half_a_body(running) as sock:
        assert sock.recv(65536).startswith(b"HTTP/1.1 408 ")
    assert running.service._bodies.held == 0


def test_a_client_that_leaves_before_its_body_has_come_counts_no_more(running):
    with half_a_body(running):
        wait_until(lambda: running.service._bodies.held == 99)
        assert running.service.admission.taken == 1
    wait_until(lambda: running.service._bodies.held == running.service.admission.taken == 0)


def test_bodies_take_only_so_much_memory_together(running, monkeypatch):
    monkeypatch.setattr(body, "_LONGEST_AT_ONCE", 1)
    monkeypatch.setattr(running.service._bodies, "max_bytes", 100_000)
    with half_a_body(running, 60_000):
        wait_until(lambda: running.service._bodies.held == 59_999)
        with half_a_body(running, 60_000) as sock:
            answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in answer.lower()
        assert running.post(COMPLETIONS, {**LONG, "max_tokens": 1}).status == 200


def test_more_answers_than_can_ever_wait_are_no_matter_of_time(running):
    for fields in ({"n": 9}, {"prompt": ["x"] * 9}, {"prompt": ["x"] * 3, "n": 3}):
        reply = running.post(COMPLETIONS, {**LONG, **fields})
        assert reply.status == 400
        assert str(ROWS + WAITING) in reply.error["message"]


def blocks_come_back(running) -> float:
    """Return the seconds until no block is in use."""
    began = time.monotonic()
    wait_until(lambda: running.llm.stats()["num_used_blocks"] == 0, 5)
    return time.monotonic() - began


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_blocks_within_a_second(running, begin, streams):
    before = running.metric("request_success_total", finished_reason="abort")
    sock = begin(stream=streams, n=2)
    wait_until(lambda: running.llm.stats()["num_used_blocks"] > 2)
    sock.close()
    assert blocks_come_back(running) < 1
    wait_until(
        lambda: running.metric("request_success_total", finished_reason="abort") == before + 2
    )


def test_a_client_that_leaves_the_queue_is_never_run(running, begin):
    running_ones = [begin() for _ in range(ROWS)]
    wait_until(lambda: running.llm.stats()["num_running"] == ROWS)
    waiting = [begin(stream=s) for s in (True, False)]
    wait_until(lambda: running.llm.stats()["num_waiting"] == 2)
    for sock in waiting:
        sock.close()
    wait_until(lambda: running.llm.stats()["num_waiting"] == 0, 5)
    assert running.llm.stats()["num_running"] == ROWS
    for sock in running_ones:
        sock.close()
    assert blocks_come_back(running) < 1


def test_a_client_that_leaves_while_its_text_is_encoded_reaches_no_engine(
    running, begin, monkeypatch
):
    began, go_on = threading.Event(), threading.Event()
    encode = Tokenizer.encode

    def slow(self, text, **more):
        began.set()
        go_on.wait(10)
        return encode(self, text, **more)

    before = running.metric("prompt_tokens_total")
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", slow)
        sock = begin()
        assert began.wait(10)
        assert running.get("/health").status == 200
        sock.close()
        wait_until(lambda: not running.service.jobs)
        go_on.set()
        wait_until(running.is_idle)
    time.sleep(0.1)
    assert running.is_idle()
    assert running.metric("prompt_tokens_total") == before


def test_long_texts_to_tokenize_keep_no_answer_waiting(running, monkeypatch):
    go_on = threading.Event()

    def slow(body):
        go_on.wait(30)
        return b"{}"

    with monkeypatch.context() as patch, ThreadPoolExecutor(8) as pool:
        patch.setattr(running.service.reader, "tokenize", slow)
        replies = [pool.submit(running.post, "/tokenize", {"prompt": "x"}) for _ in range(8)]
        try:
            wait_until(lambda: running.service._bodies.held == 8 * len(b'{"prompt": "x"}'))
            assert running.post(COMPLETIONS, {**LONG, "max_tokens": 1}, timeout=20).status == 200
        finally:
            go_on.set()
        assert all(reply.result().status == 200 for reply in replies)


@pytest.fixture
def small_buffers(running):
    """New connections buffer little, so that who does not read keeps the server from sending."""
    sock = running.server._sock  # those it accepts are as it is
    before = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    yield
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, before // 2)  # Linux doubles it


@pytest.mark.usefixtures("small_buffers")
def test_a_client_that_does_not_read_keeps_nobody_waiting(running, begin):
    sock = begin(stream=True, logprobs=20, max_tokens=300)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    wait_until(lambda: running.service.engine.num_followed)
    assert running.post(COMPLETIONS, {**LONG, "max_tokens": 5}).status == 200
    wait_until(lambda: running.service.engine.num_followed == 0, 30)
    time.sleep(0.1)
    assert len(running.service.jobs) == 1, "most is still to be sent"
    assert running.post(COMPLETIONS, {**LONG, "max_tokens": 5}).status == 200
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    received = b""
    while b"[DONE]" not in received:
        received += sock.recv(65536)
    _, _, said = received.partition(b"\r\n\r\n")
    events = [json.loads(e[6:]) for e in said.split(b"\n") if e.startswith(b"data: {")]
    assert sum(len(e["choices"][0]["logprobs"]["tokens"]) for e in events) == 300
    assert len(events) < 250, "what waited came as one"


@pytest.mark.usefixtures("small_buffers")
def test_a_client_that_leaves_without_reading_is_forgotten(running, begin):
    sock = begin(stream=True, logprobs=20, max_tokens=300)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    wait_until(lambda: running.service.engine.num_followed)
    wait_until(lambda: running.service.engine.num_followed == 0, 30)
    assert len(running.service.jobs) == 1
    sock.close()
    wait_until(running.is_idle)


@pytest.mark.usefixtures("small_buffers")
def test_an_answer_that_nobody_reads_is_not_kept(running, begin, monkeypatch):
    monkeypatch.setattr(protocol, "_READ_PATIENCE_S", 0.2)
    sock = begin(stream=True, logprobs=20, max_tokens=900)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    wait_until(lambda: running.service.jobs)
    wait_until(running.is_idle, 30)
    received = b"".join(iter(lambda: sock.recv(65536), b""))
    assert b"[DONE]" not in received


@pytest.mark.usefixtures("small_buffers")
def test_an_answer_that_is_read_slowly_is_sent_to_its_end(running, begin, monkeypatch):
    monkeypatch.setattr(protocol, "_READ_PATIENCE_S", 1.0)
    sock = begin(n=2, logprobs=20, max_tokens=300)  # whole: all of it waits at once
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    wait_until(lambda: running.service.engine.num_followed)
    wait_until(lambda: not running.service.engine.num_followed, 30)
    began, received = time.monotonic(), b""
    while not received.endswith(b"}]}"):
        received += sock.recv(16384)
        time.sleep(0.06)
    assert json.loads(received.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 600
    assert time.monotonic() - began > protocol._READ_PATIENCE_S


def test_answers_are_the_engines_own_among_many_clients_some_of_whom_leave(running):
    prompts = ["ROMEO:", "JULIET:\nO", "First Citizen:\nBefore we proceed", "KING", "To be, or"]
    params = [{"temperature": 0.8, "seed": i, "max_tokens": 3 + 7 * (i % 5)} for i in range(24)]
    expected = [
        running.llm.generate(prompts[i % 5], SamplingParams(**p))[0].outputs[0].text
        for i, p in enumerate(params)
    ]

    def ask(i):
        body = {"model": MODEL, "prompt": prompts[i % 5], **params[i]}
        if i % 6 == 5:  # leaves
            sock = running.begin(COMPLETIONS, {**body, "max_tokens": 500, "stream": i % 4 == 1})
            time.sleep(0.02 * (i % 3))
            sock.close()
            return None
        while True:
            reply = running.post(COMPLETIONS, {**body, "stream": i % 2 == 0})
            if reply.status != 429:
                break
            time.sleep(0.05)
        if i % 2:
            return reply.json["choices"][0]["text"]
        return "".join(e["choices"][0]["text"] for e in events_of(reply.body)[:-1])

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(24)))
    for i, answer in enumerate(answers):
        assert answer in (expected[i], None if i % 6 == 5 else expected[i])


def test_finished_requests_leave_no_trace(running):
    """They stayed in a table of another server (ROCm/ATOM#1441)."""

    def num_tasks() -> int:
        async def count() -> int:
            return len(asyncio.all_tasks())

        return asyncio.run_coroutine_threadsafe(count(), running.service._loop).result()

    connection = HTTPConnection(*running.address, timeout=30)
    body = b'{"model": "small", "prompt": "x", "max_tokens": 1}'
    counts = []
    for _ in range(1000):  # on one connection
        connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        response.read()
        counts.append(num_tasks())
    connection.close()
    wait_until(running.is_idle)
    assert max(counts) <= min(counts) + 2
    assert running.service._bodies.held == 0
    assert not running.llm._requests
