"""Connections whose clients do not do as they should: none is held, none keeps memory."""

from __future__ import annotations

import json
import socket
import time
import tracemalloc
from contextlib import ExitStack

import pytest

from support.servers import MODEL, serving, wait_until
from tvr import demo
from tvr.serve import listener, protocol

COMPLETIONS = "/v1/completions"
LONG = {"model": MODEL, "prompt": "ROMEO:", "max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def running():
    with serving(demo.path(), {"max_num_seqs": 2}) as running:
        yield running


@pytest.fixture(autouse=True)
def _leaves_nothing(running):
    yield
    wait_until(running.is_idle)


def num_connections(running) -> int:
    return len(running.server._uvicorn.server_state.connections)


@pytest.mark.parametrize("head", ["GET /health", "POST /no-such-route", "PUT /v1/completions"])
def test_a_body_that_nobody_wants_holds_no_connection(running, monkeypatch, head):
    """One byte of it after the answer was enough to hold it for ever, without a key."""
    monkeypatch.setattr(protocol, "_PATIENCE_S", 0.2)
    with socket.create_connection(running.address, timeout=30) as sock:
        sock.sendall(f"{head} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n".encode())
        assert sock.recv(65536).startswith(b"HTTP/1.1 ")
        sock.sendall(b"x")
        while sock.recv(65536):  # until the server closes it
            pass


def test_the_end_of_an_answer_that_nobody_reads_holds_no_connection(running, monkeypatch):
    """What is left of it may be less than what makes the server wait before it sends more."""
    monkeypatch.setattr(protocol, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(protocol, "_READ_PATIENCE_S", 0.3)
    accepting = running.server._sock  # those it accepts are as it is
    before = accepting.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    accepting.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    held = num_connections(running)
    body = json.dumps({"prompt": "a b c d " * 1500}).encode()
    try:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(running.address)
            head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
            head += "Content-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

            def waiting() -> list[int]:
                states = list(running.server._uvicorn.server_state.connections)
                return [state.transport.get_write_buffer_size() for state in states]

            wait_until(lambda: any(0 < size < 1 << 16 for size in waiting()))
            wait_until(lambda: num_connections(running) == held)
    finally:
        accepting.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, before // 2)  # Linux doubles it


@pytest.mark.parametrize("ahead", [b"\r\n", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_client_that_leaves_after_it_sent_more_frees_its_blocks_within_a_second(running, ahead):
    with running.begin(COMPLETIONS, {**LONG, "n": 2}) as sock:
        wait_until(lambda: running.llm.stats()["num_running"] == 2)
        sock.sendall(ahead)
        time.sleep(0.1)
    began = time.monotonic()
    wait_until(lambda: running.llm.stats()["num_used_blocks"] == 0)
    assert time.monotonic() - began < 1


def test_requests_that_come_at_once_are_answered_one_after_another(running):
    body = json.dumps({**LONG, "max_tokens": 3}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    one = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection(running.address, timeout=60) as sock:
        sock.sendall(one * 300)  # more than is read ahead
        answers = b""
        while answers.count(b'"completion_tokens":3') < 300:
            answers += sock.recv(65536)
    assert answers.count(b"HTTP/1.1 200 ") == 300


def test_a_body_is_not_kept_while_its_answer_waits(running):
    """It was, and counted no more: a thousand that waited could hold 8 GB."""
    num, size = 6, 3_000_000
    with ExitStack() as socks:
        for _ in range(2):
            socks.enter_context(running.begin(COMPLETIONS, {**LONG, "stream": True}))
        wait_until(lambda: running.llm.stats()["num_running"] == 2)
        tracemalloc.start()
        try:
            for i in range(num):
                long = {**LONG, "user": "x" * size}
                socks.enter_context(running.begin(COMPLETIONS, long))
                wait_until(lambda i=i: running.service.engine.num_followed == 3 + i, 30)
            wait_until(lambda: running.service._bodies.held == 0)
            del long
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept < 2 * size


@pytest.mark.parametrize(("version", "chunked"), [("1.0", False), ("1.1", False), ("1.1", True)])
def test_a_refusal_reaches_a_client_that_sends_on_and_closes(running, version, chunked):
    """The connection was reset: in place of 401, 404 or 429 it saw a server that was gone."""
    size = 7_000_000
    rest = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    head = f"POST /no-such-route HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n{rest}"
    body = b"x" * size
    if chunked:
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, body)
    with socket.create_connection(running.address, timeout=60) as sock:
        sock.sendall(f"{head}\r\n\r\n".encode())
        time.sleep(0.2)  # for an answer before the body
        sock.sendall(body)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert b" 404 " in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_a_refusal_waits_only_so_long_for_a_body(running, monkeypatch):
    monkeypatch.setattr(listener, "_PATIENCE_S", 0.2)
    with socket.create_connection(running.address, timeout=60) as sock:
        sock.sendall(b"POST /x HTTP/1.0\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n1")
        assert b" 404 " in sock.recv(65536)


def test_a_client_that_asks_whether_to_send_is_refused_before_it_does(running):
    with socket.create_connection(running.address, timeout=60) as sock:
        head = "POST /x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 9\r\n"
        sock.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404 ")
