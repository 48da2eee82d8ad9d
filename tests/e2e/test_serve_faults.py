"""Faults of the engine, ends of the process, and what clients learn of them."""

from __future__ import annotations

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from support.serve_process import Process
from support.servers import MODEL, events_of, serving, wait_until
from tvr import demo
from tvr.core.runner import ModelRunner
from tvr.core.scheduler import Scheduler
from tvr.errors import KernelError

COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL, "prompt": "ROMEO:", "max_tokens": 20, "temperature": 0}
LONG = {**BODY, "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def running():
    with serving(demo.path()) as running:
        yield running


@pytest.fixture(scope="module")
def lasting():
    """One for the tests that do not end it."""
    with serving(demo.path()) as running:
        yield running


def failing_at(call, error):
    """Return a `_run` that raises at its call number `call`."""
    run, calls = ModelRunner._run, []

    def failing(self, *args):
        calls.append(1)
        if len(calls) == call:
            raise error
        return run(self, *args)

    return failing


def test_a_failed_step_ends_its_requests_and_no_others(lasting, monkeypatch):
    """One data chunk with an error object, and the end of the stream within a second."""
    expected = lasting.post(COMPLETIONS, BODY).json["choices"]
    wait_until(lasting.is_idle)
    monkeypatch.setattr(ModelRunner, "_run", failing_at(5, RuntimeError("out of\nluck")))
    began = time.monotonic()
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = lasting.post(COMPLETIONS, {**LONG, "stream": True, "stream_options": options})
    assert time.monotonic() - began < 5
    assert reply.status == 200
    *chunks, last = events_of(reply.body)
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert last.keys() == {"error"}
    assert last["error"]["type"] == "server_error"
    assert "out of luck" in last["error"]["message"]
    monkeypatch.setattr(ModelRunner, "_run", failing_at(5, RuntimeError("out of luck")))
    reply = lasting.post(COMPLETIONS, LONG)
    assert (reply.status, reply.error["code"]) == (500, "engine_error")
    assert lasting.get("/health").status == 200
    assert lasting.post(COMPLETIONS, BODY).json["choices"] == expected
    assert lasting.metric("request_success_total", finished_reason="error") == 2
    wait_until(lasting.is_idle)


def test_openais_client_raises_what_ends_a_stream(lasting, monkeypatch):
    import openai

    monkeypatch.setattr(ModelRunner, "_run", failing_at(3, RuntimeError("out of luck")))
    with lasting.openai() as client:
        fields = {key: LONG[key] for key in ("model", "prompt", "max_tokens")}
        stream = client.completions.create(**fields, stream=True)
        with pytest.raises(openai.APIError, match="out of luck"):
            list(stream)


def test_an_error_in_the_books_ends_all_requests_once_and_the_engine_begins_anew(
    lasting, monkeypatch
):
    update, calls = Scheduler.update_columns, []

    def torn(self, *args):
        calls.append(1)
        if len(calls) == 4:
            raise AssertionError("two and two is five")
        return update(self, *args)

    monkeypatch.setattr(Scheduler, "update_columns", torn)
    reply = lasting.post(COMPLETIONS, {**LONG, "stream": True})
    assert "interrupted" in events_of(reply.body)[-1]["error"]["message"]
    assert lasting.post(COMPLETIONS, BODY).status == 200
    wait_until(lasting.is_idle)


def serve_until_it_breaks(monkeypatch, kind):
    """Serve a stream through a fault for good; return what its client got."""

    def broken(*args):
        raise RuntimeError("an illegal\naddress")

    with serving(demo.path()) as running, ThreadPoolExecutor(1) as pool:
        if kind == "device":
            monkeypatch.setattr(ModelRunner, "_run", failing_at(4, RuntimeError("x")))
            monkeypatch.setattr(ModelRunner, "why_lost", lambda self: "an illegal address")
        elif kind == "books":
            monkeypatch.setattr(Scheduler, "schedule", broken)
        else:
            monkeypatch.setattr(type(running.llm), "has_unfinished_requests", broken)
        reply = pool.submit(running.post, COMPLETIONS, {**LONG, "stream": True}).result(30)
        running.thread.join(30)
        assert not running.thread.is_alive()
        monkeypatch.undo()
        assert "error" in events_of(reply.body)[-1]


@pytest.mark.parametrize("kind", ["device", "books", "thread"])
def test_a_fault_for_good_is_told_to_clients_and_ends_the_server(monkeypatch, kind):
    with pytest.raises(KernelError, match=r"the engine has ended: .*an illegal address"):
        serve_until_it_breaks(monkeypatch, kind)


def test_health_is_503_once_the_engine_has_ended(running, monkeypatch):
    monkeypatch.setattr(running.service, "on_fatal", lambda: None)  # the process would end
    running.service.engine.fatal = "an illegal address"
    running.service.engine._wake.set()
    wait_until(lambda: not running.service.engine._thread.is_alive())
    assert running.get("/health").status == 503
    head = running.ask("HEAD", "/health")
    assert (head.status, head.body) == (503, b"")
    reply = running.post(COMPLETIONS, BODY)
    assert reply.status == 503
    assert "an illegal address" in reply.error["message"]
    running.service.engine.fatal = None  # so that it may end in peace
    assert running.get("/health").status == 503


def test_a_server_that_is_asked_to_stop_finishes_what_it_has(running):
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(running.post, COMPLETIONS, {**LONG, "max_tokens": 150})
        stream = pool.submit(running.post, COMPLETIONS, {**LONG, "max_tokens": 150, "stream": True})
        wait_until(lambda: running.llm.stats()["num_running"] == 2)
        running.server.stop()
        assert whole.result(30).json["usage"]["completion_tokens"] == 150
        assert stream.result(30).body.endswith(b"data: [DONE]\n\n")
    running.thread.join(10)
    assert not running.thread.is_alive()
    with pytest.raises(ConnectionError):
        running.get("/health")


def test_time_to_finish_is_limited_and_clients_are_told():
    with serving(demo.path(), drain_s=0.3) as running:
        with ThreadPoolExecutor(2) as pool:
            whole = pool.submit(running.post, COMPLETIONS, {**LONG, "n": 16})
            stream = pool.submit(running.post, COMPLETIONS, {**LONG, "n": 16, "stream": True})
            wait_until(lambda: running.llm.stats()["num_running"] == 32)
            began = time.monotonic()
            running.server.stop()
            assert whole.result(30).status == 503
            assert whole.result().error["code"] == "shutting_down"
            last = events_of(stream.result(30).body)[-1]
            assert last["error"]["code"] == "shutting_down"
        running.thread.join(10)
        assert time.monotonic() - began < 10  # all answers would take a minute


def test_a_client_whose_body_has_not_come_by_then_is_told_too():
    with serving(demo.path(), drain_s=0.1) as running:
        host, port = running.address
        with socket.create_connection((host, port), timeout=30) as sock:
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n"
            head += "Content-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
            wait_until(lambda: running.service.admission.taken == 1)
            running.server.stop()
            assert sock.recv(65536).startswith(b"HTTP/1.1 503")
        running.thread.join(10)


def test_a_signal_lets_the_process_finish_and_end_in_peace():
    with Process() as process:
        running = process.running()
        body = {**LONG, "model": "demo", "max_tokens": 200}
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(running.post, COMPLETIONS, body)
            wait_until(lambda: b'running{model_name="demo"} 1' in running.get("/metrics").body)
            process.popen.send_signal(signal.SIGTERM)
            assert reply.result(30).json["usage"]["completion_tokens"] == 200
        assert process.end() == 0
        assert len(process.lines) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_second_signal_ends_at_once_with_one_line(number, code):
    """It printed the traceback of uvicorn's own cancellation."""
    with Process() as process:
        running = process.running()
        body = {**LONG, "model": "demo", "n": 16}
        stream = running.begin(COMPLETIONS, {**body, "stream": True})
        whole = running.begin(COMPLETIONS, body)
        assert stream.recv(100)
        wait_until(lambda: b'running{model_name="demo"} 32' in running.get("/metrics").body)
        began = time.monotonic()
        for _ in range(2):
            process.popen.send_signal(number)
            time.sleep(0.3)
        assert process.end() == code
        assert time.monotonic() - began < 10  # all answers would take a minute
        assert process.lines[1:] == ["asked to stop again; requests that are cut off: 2\n"]
        for sock in (stream, whole):
            with sock:
                answer = b"".join(iter(partial(sock.recv, 65536), b""))
            assert b'"code":"shutting_down"' in answer
            assert (b" 503 " in answer) == (sock is whole)


FAULTS = {
    "lost": (
        "def fail(self, *args): raise RuntimeError('boom')\n"
        "runner.ModelRunner._run = fail\n"
        "runner.ModelRunner.why_lost = lambda self: 'an illegal address'\n",
        "the engine has ended: the device is lost: an illegal address",
    ),
    "hangs": (
        "import time\n"
        "from tvr.serve import server\n"
        "runner.ModelRunner._run = lambda *args: time.sleep(1000)\n"
        "server._LAST_STEP_S = 0.5\n",
        "a step of the engine did not end within 0.5 s",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_process_whose_device_is_lost_or_hangs_ends_with_one_line_and_an_error(kind):
    fault, expected = FAULTS[kind]
    code = f"import tvr.cli\nfrom tvr.core import runner\n{fault}tvr.cli.main()"
    with Process("--drain-s", "0.1", code=code) as process:
        running = process.running()
        with ThreadPoolExecutor(1) as pool:
            reply = pool.submit(running.post, COMPLETIONS, {**BODY, "model": "demo"})
            if kind == "hangs":
                wait_until(lambda: b'running{model_name="demo"} 1' in running.get("/metrics").body)
                assert running.get("/health").status == 200
                process.popen.send_signal(signal.SIGTERM)
            assert reply.result(30).status in (500, 503)
        assert process.end() == 2
        assert process.lines[-1] == f"tvr: error: {expected}\n"


def test_a_third_signal_does_not_wait_for_a_step_that_hangs():
    """It never ended: the wait was cut off, and the engine closed, which waits for the step."""
    code = f"import tvr.cli\nfrom tvr.core import runner\n{FAULTS['hangs'][0]}"
    code = code.replace("0.5", "60.0") + "tvr.cli.main()"
    with Process(code=code) as process:
        running = process.running()
        sock = running.begin(COMPLETIONS, {**BODY, "model": "demo"})
        wait_until(lambda: b'running{model_name="demo"} 1' in running.get("/metrics").body)
        process.popen.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.popen.send_signal(signal.SIGINT)
        with sock:
            assert sock.recv(100).startswith(b"HTTP/1.1 503 ")
        while process.popen.poll() is None:
            process.popen.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert process.end() == 2
        assert process.lines[-1] == (
            "tvr: error: a step of the engine had not ended when the server was told to end at "
            "once\n"
        )


def test_a_request_that_comes_while_the_server_ends_is_no_fault_of_it(running):
    running.service.stop()
    assert running.get("/health").status == 503
    bodies = ({**BODY, "user": "x" * size} for size in (1, 100_000))
    replies = [running.post(COMPLETIONS, body) for body in bodies]
    replies += [running.post("/tokenize", {"prompt": "x" * size}) for size in (1, 100_000)]
    assert {(reply.status, reply.error["code"]) for reply in replies} == {(503, "engine_dead")}
