"""Long bodies are read in a process of its own, and keep nobody waiting."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http import HTTPStatus

import pytest

from support.apart_target import Target
from support.serve_process import Process
from support.servers import MODEL, serving, wait_until
from tvr import demo
from tvr.core.tokenizer import Tokenizer
from tvr.serve.apart import Apart
from tvr.serve.errors import ApiError, bad_request

COMPLETIONS = "/v1/completions"
LONG_TEXT = "O Romeo, Romeo! " * 2000


@pytest.fixture(scope="module")
def running():
    with serving(demo.path()) as running:
        yield running


@pytest.fixture
def apart():
    apart = Apart(pickle.dumps(Target()), "test")
    yield apart
    apart.close()


def test_calls_are_made_in_another_process_which_lasts(apart):
    pids = {apart.submit("pid", b"").result(60) for _ in range(3)}
    assert len(pids) == 1
    assert os.getpid() not in pids
    data = os.urandom(5_000_000)
    assert apart.submit("twice", data).result(60) == data + data


def test_a_mistake_in_the_other_process_is_told_with_its_place(apart):
    with pytest.raises(RuntimeError, match=r"ZeroDivisionError"):
        apart.submit("fail", b"").result(60)
    assert apart.submit("twice", b"1").result(60) == b"11"


def test_a_process_that_ends_costs_one_call(apart):
    pid = apart.submit("pid", b"").result(60)
    call = apart.submit("sleep", b"")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ApiError, match="try again") as error:
        call.result(60)
    assert error.value.status == HTTPStatus.SERVICE_UNAVAILABLE
    assert apart.submit("pid", b"").result(60) != pid


def test_closing_ends_a_call_that_is_under_way(apart):
    pid = apart.submit("pid", b"").result(60)
    call = apart.submit("sleep", b"")
    waiting = apart.submit("twice", b"")
    wait_until(call.running)
    apart.close()
    with pytest.raises(ApiError):
        call.result(60)
    assert waiting.cancelled()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_call_that_is_cancelled_keeps_no_memory_while_others_go_on(apart):
    """Bodies of clients that had left stayed in the queue, and counted no more."""
    apart.submit("pid", b"").result(60)
    apart.submit("sleep", b"")
    data = os.urandom(1000)
    before = sys.getrefcount(data)
    call = apart.submit("twice", data)
    assert sys.getrefcount(data) == before + 1
    assert call.cancel()
    assert sys.getrefcount(data) == before


def test_a_process_that_ends_between_calls_costs_none(apart):
    pid = apart.submit("pid", b"").result(60)
    os.kill(pid, signal.SIGKILL)
    apart._process.wait()
    assert apart.submit("pid", b"").result(60) != pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_does_not_end_it(apart, number):
    """A supervisor's, or Ctrl-C on a system without sessions."""
    pid = apart.submit("pid", b"").result(60)
    os.kill(pid, number)
    assert apart.submit("pid", b"").result(60) == pid


def test_a_signal_to_all_processes_does_not_end_one_that_is_starting(apart):
    call = apart.submit("pid", b"")
    wait_until(lambda: apart._process)
    status = f"/proc/{apart._process.pid}/status"

    def ignored() -> int:
        with open(status) as lines:
            (mask,) = (line.split()[1] for line in lines if line.startswith("SigIgn:"))
        return int(mask, 16)

    wait_until(lambda: ignored() >> (signal.SIGTERM - 1) & 1)
    assert not call.done()
    os.kill(apart._process.pid, signal.SIGTERM)
    assert call.result(60) == apart._process.pid


@pytest.mark.parametrize("size", [10, 1_000_000], ids=["short", "long"])
def test_it_ends_in_silence_if_the_server_is_killed_in_the_middle_of_a_call(size):
    """It printed a traceback, in the log behind what had killed the server."""
    code = (
        "import os, pickle, signal, sys, threading, time\n"
        "sys.path.insert(0, 'tests')\n"
        "from support.apart_target import Target\n"
        "from tvr.serve.apart import Apart\n"
        "apart = Apart(pickle.dumps(Target()), 'test')\n"
        "apart.submit('pid', b'').result()\n"
        f"apart.submit('twice_slowly', b'x' * {size})\n"
        "time.sleep(0.2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # Its end is the end of stderr, which the other process has, too.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_it_ends_with_the_process_that_started_it():
    code = (
        "import pickle, os, signal\n"
        "from tvr.serve.apart import Apart\n"
        "from tvr.core.tokenizer import Tokenizer\n"
        "from tvr import demo\n"
        "apart = Apart(pickle.dumps(Tokenizer.from_dir(demo.path())), 'test')\n"
        "apart.submit('token_bytes', 1).result()\n"
        "print(apart._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)

    def has_ended() -> bool:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    wait_until(has_ended, 30)


def test_errors_come_from_another_process_whole():
    error = ApiError(429, "no room", param="n", code="full", headers={"Retry-After": "1"})
    for one in (error, bad_request("no")):
        copy = pickle.loads(pickle.dumps(one))
        assert (copy.status, copy.body, copy.headers) == (one.status, one.body, one.headers)


def test_a_tokenizer_comes_to_another_process_whole(running):
    ours = running.llm.tokenizer
    theirs = pickle.loads(pickle.dumps(ours))
    assert isinstance(theirs, Tokenizer)
    assert theirs.encode(LONG_TEXT) == ours.encode(LONG_TEXT)
    assert theirs.eos_token_ids == ours.eos_token_ids
    assert theirs.has_chat_template == ours.has_chat_template


def test_long_requests_are_answered_and_refused_as_short_ones(running):
    """The same prompts, once with white space between them."""
    for fields in ({}, {"echo": True}, {"logprobs": 2}, {"stop": "e"}, {"n": 2, "seed": 1}):
        asked = {"model": MODEL, "prompt": ["ROMEO:", "O"], "max_tokens": 8, "temperature": 0}
        short = running.post(COMPLETIONS, {**asked, **fields})
        long = running.post(COMPLETIONS, {**asked, **fields, "user": "x" * 100_000})
        assert short.status == long.status == 200
        assert short.json["choices"] == long.json["choices"]
        assert short.json["usage"]["total_tokens"] == long.json["usage"]["total_tokens"]
    for wrong in ({"n": 0}, {"model": "other"}, {"prompt": [[10**30]]}, {"no": 1}, {"tools": []}):
        short = running.post(COMPLETIONS, {**asked, **wrong})
        long = running.post(COMPLETIONS, {**asked, **wrong, "user": "x" * 100_000})
        assert 400 <= short.status < 500
        assert (short.status, short.error) == (long.status, long.error)


def test_long_texts_have_the_tokens_of_the_engines_own_tokenizer(running):
    answer = running.post("/tokenize", {"prompt": LONG_TEXT}).json
    assert answer["tokens"] == running.llm.tokenizer.encode(LONG_TEXT)
    back = running.post("/detokenize", {"tokens": answer["tokens"]}).json
    assert back["prompt"].endswith(LONG_TEXT)


def test_long_requests_are_served_after_their_process_was_killed(running):
    """By the system, where memory is short."""
    body = {"prompt": LONG_TEXT}
    assert running.post("/tokenize", body).status == 200
    process = running.service._converter_apart._process
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(running.post, "/tokenize", {"prompt": "a" * 4_000_000})
        wait_until(lambda: running.service._converter_apart._thread._work_queue.empty())
        time.sleep(0.3)
        assert not reply.done()
        process.kill()
        assert (reply.result().status, reply.result().error["code"]) == (503, "reader_ended")
    assert running.post("/tokenize", body).status == 200
    running.service._converter_apart._process.kill()
    running.service._converter_apart._process.wait()
    assert running.post("/tokenize", body).status == 200


def test_a_long_text_that_is_still_read_does_not_hold_up_the_end():
    text = "a" * 4_000_000
    with serving(demo.path()) as running, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(running.post, "/tokenize", {"prompt": text})
        wait_until(lambda: running.service._converter_apart._process)
        running.server.stop()
        running.server.stop()
        running.thread.join(20)
        assert not running.thread.is_alive()
        with suppress(OSError):
            reply.result(20)


@pytest.mark.slow
def test_health_is_answered_beside_megabytes_of_text_and_many_streams():
    """The engine's thread, the texts and their answers took up to 1.3 s of Python's lock.

    What is seen where nothing else runs is under 50 ms; other work on the machine adds to it.
    """
    megabytes = 8
    text = b'{"prompt": "' + b"word salad, " * (megabytes * 87_000) + b'"}'
    tokens = b'{"tokens": [1' + b",1" * (megabytes * 500_000) + b"]}"
    stream = {"prompt": "ROMEO:", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with Process() as process, ExitStack() as stack:
        running = process.running()
        socks = [
            stack.enter_context(running.begin(COMPLETIONS, {**stream, "model": "demo"}))
            for _ in range(64)
        ]

        def read_all(sock: socket.socket) -> None:
            with suppress(OSError):
                while sock.recv(1 << 20):
                    pass

        readers = [threading.Thread(target=read_all, args=(sock,)) for sock in socks]

        def send_texts(path: str, body: bytes) -> None:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            with suppress(OSError), socket.create_connection(running.address) as sock:
                socks.append(sock)
                sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                read_all(sock)

        for path, body in (("/tokenize", text), ("/detokenize", tokens)):
            readers += [threading.Thread(target=send_texts, args=(path, body)) for _ in range(4)]
        for reader in readers:
            reader.start()
        times, end = [], time.monotonic() + 6
        while time.monotonic() < end:
            began = time.perf_counter()
            assert running.get("/health").status == 200
            times.append(time.perf_counter() - began)
            time.sleep(0.01)
        for _ in range(2):
            process.popen.send_signal(signal.SIGINT)
            time.sleep(0.3)
        for reader in readers:
            reader.join(30)
    times.sort()
    assert times[len(times) * 98 // 100] < 0.1
    assert times[-1] < 0.4
