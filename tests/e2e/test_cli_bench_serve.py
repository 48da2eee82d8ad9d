"""`tvr bench serve` against a server on a real socket whose timing is known."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time

import pytest

from support.cli import refused_here, run_here
from support.sse_server import FakeServer, running

pytest.importorskip("httpx2")

SIZES = ("--num-prompts", "6", "--input-len", "5", "--output-len", "8")


@pytest.fixture
def bench(tmp_path):
    """Run the benchmark against a server; return what it left, and its row."""

    def run(server, *options):
        file = tmp_path / "s.json"
        done = run_here(
            "bench", "serve", "--base-url", server.url, *SIZES, *options, "--json", file
        )
        return done, json.loads(file.read_text())["rows"][0] if file.exists() else None

    return run


def test_known_timings_come_back(bench):
    server = FakeServer(first_s=0.15, gap_s=0.05)
    with running(server):
        done, row = bench(server, "--percentile-metrics", "ttft,tpot,itl,e2el")
    assert (done.returncode, done.stderr) == (0, "")
    assert (row["completed"], row["failed"]) == (6, 0)
    assert (row["total_input_tokens"], row["total_output_tokens"]) == (30, 48)
    # The server is never early; how late this machine makes it is not known.
    for name, least in {"ttft": 150, "tpot": 50, "itl": 50, "e2el": 500}.items():
        assert least - 10 < row[f"median_{name}_ms"] < least * 1.3 + 20, name
    assert 0.5 <= row["duration"] < 2.5  # one after the other it would be 3
    assert row["output_throughput"] == pytest.approx(48 / row["duration"])
    assert row["total_token_throughput"] == pytest.approx(78 / row["duration"])
    assert row["request_throughput"] == pytest.approx(6 / row["duration"])
    assert row["max_concurrent_requests"] == 6
    assert row["max_output_tokens_per_s"] == 48  # all within the first second
    assert [len(gaps) for gaps in row["itls"]] == [7] * 6
    assert sum(row["itls"][0]) == pytest.approx(row["latencies"][0] - row["ttfts"][0])


def test_the_report_has_vllms_lines(bench):
    server = FakeServer(gap_s=0.001)
    with running(server):
        done, row = bench(server, "--metric-percentiles", "50,99.9", "--max-concurrency", "3")
    lines = done.stdout.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    labels = [line.rpartition(":")[0] for line in lines if ":" in line]
    assert labels == [
        *("Successful requests", "Failed requests", "Maximum request concurrency"),
        *("Benchmark duration (s)", "Total input tokens", "Total generated tokens"),
        *("Request throughput (req/s)", "Output token throughput (tok/s)"),
        *("Peak output token throughput (tok/s)", "Peak concurrent requests"),
        "Total token throughput (tok/s)",
        *(
            f"{what} {metric} (ms)"
            for metric in ("TTFT", "TPOT", "ITL")
            for what in ("Mean", "Median", "P50", "P99.9")
        ),
    ]
    assert f"{'P99.9 ITL (ms):':<40} {row['p99.9_itl_ms']:.2f}" in lines


@pytest.mark.parametrize("counts_each", [True, False])
def test_tokens_that_come_in_one_chunk_are_all_counted(bench, counts_each):
    server = FakeServer(first_s=0.05, gap_s=0.06, chunk_tokens=3, counts_each=counts_each)
    with running(server):
        _, row = bench(server)
    assert row["output_lens"] == [8] * 6  # chunks of 3, 3 and 2
    assert row["median_tpot_ms"] == pytest.approx(120 / 7, rel=0.4)
    (itls, *_), latency, ttft = row["itls"], row["latencies"][0], row["ttfts"][0]
    assert len(itls) == 7
    assert sum(itls) == pytest.approx(latency - ttft)
    if counts_each:
        assert itls[:2] == [0.0, 0.0]  # with the first
        assert itls[2] == itls[3] == itls[4]
        assert itls[5] == itls[6]
        assert itls[2] == pytest.approx(0.02, abs=0.008)
        assert itls[5] == pytest.approx(0.03, abs=0.012)


def test_goodput_counts_what_keeps_every_limit(bench):
    server = FakeServer(first_s=0.05, gap_s=0.02)
    slow = FakeServer(first_s=0.05, gap_s=0.12)
    limits = ("--goodput", "ttft:5000", "tpot:80")
    with running(server), running(slow):
        done, row = bench(server, *limits)
        _, slow_row = bench(slow, *limits)
    assert row["request_goodput"] == pytest.approx(row["request_throughput"])
    assert slow_row["request_goodput"] == 0
    assert "Request goodput (req/s):" in done.stdout


def test_no_more_requests_are_under_way_than_allowed(bench):
    server = FakeServer(first_s=0.02, gap_s=0.002)
    with running(server):
        _, row = bench(server, "--max-concurrency", "2", "--num-prompts", "9")
    assert server.most_at_once == 2
    assert row["max_concurrent_requests"] == 2
    assert row["completed"] == 9
    # The clock of those that waited did not run meanwhile.
    assert max(row["queue_times"]) > 3 * max(row["ttfts"][:2])
    assert max(row["ttfts"]) < 0.2


def test_equal_seeds_ask_the_same_at_the_same_times(bench):
    def asked(seed):
        server = FakeServer()
        with running(server):
            bench(server, "--request-rate", "40", "--random-seed", seed)
        first, *came = server.came[1:]  # behind the one that is not measured
        return [body["prompt"] for body in server.bodies[1:]], [at - first for at in came]

    (prompts, times), (again, times_again), (others, other_times) = map(asked, (3, 3, 4))
    assert prompts == again != others
    assert times == pytest.approx(times_again, abs=0.03)
    assert times != pytest.approx(other_times, abs=0.03)


def test_an_open_loop_does_not_wait_for_answers(bench):
    server = FakeServer(first_s=1.0)
    with running(server):
        done, row = bench(server, "--request-rate", "30")
    assert server.most_at_once == 6
    assert "Request rate configured (RPS):           30.00" in done.stdout
    starts = row["start_times"]
    assert starts[-1] - starts[0] < 1.0


def test_failed_requests_are_counted_with_their_reasons(bench):
    def takes(number, body):
        return (429, {"error": {"message": "too\nmany"}}) if number in (2, 4) else None

    server = FakeServer(takes=takes, cut=lambda number: 3 if number == 5 else None, gap_s=0.001)
    with running(server):
        done, row = bench(server)
    assert done.returncode == 1
    assert (row["completed"], row["failed"]) == (3, 3)
    assert row["total_output_tokens"] == 24
    assert "error" not in row
    assert "2 failed: HTTP 429: too many" in done.stdout
    assert "1 failed: the stream broke off after 3 chunks: " in done.stdout
    assert [bool(error) for error in row["errors"]].count(True) == 3


def test_nothing_served_is_no_figure_and_exit_code_1(bench):
    server = FakeServer(takes=lambda number, body: (503, "busy") if number else None)
    with running(server):
        done, row = bench(server)
    assert done.returncode == 1
    assert row["error"] == "no request was served: HTTP 503: busy"
    assert row["median_ttft_ms"] is None
    assert "6 failed: HTTP 503: busy" in done.stdout


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([], "the stream ended without a token"),
        ([b"[DONE]"], "the stream ended without a token"),
        ([b'{"choices": [{"text": "a"}]}'], "ended after 1 chunks, without a finish_reason"),
        ([b'{"error": {"message": "out of\\nmemory"}}'], "the server says: out of memory"),
        ([b"<html>"], "the stream has no completion: <html>"),
        ([b'{"choices": [{}]}'], "the stream has no completion: "),
        ([b"[1]"], "the stream has no completion: [1]"),
    ],
)
def test_a_stream_that_is_no_answer_is_a_failure_that_says_so(bench, events, says):
    server = FakeServer(trick=lambda number: events if number == 1 else None)
    with running(server):
        done, row = bench(server)
    assert (done.returncode, row["failed"]) == (1, 1)
    assert says in done.stdout


def test_without_usage_chunks_are_counted(bench):
    server = FakeServer(usage=False, counts_each=False)
    with running(server):
        done, row = bench(server)
    assert row["output_lens"] == [8] * 6
    assert row["total_input_tokens"] == 30
    assert done.stdout.endswith("tokens are counted by chunks: the server sends no usage\n")


def test_an_end_by_itself_is_no_token(bench):
    """OpenAI's servers send the reason of the end behind the last text."""
    events = [
        b'{"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}',
        b'{"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}',
        b'{"choices": [{"delta": {"content": "b"}, "finish_reason": null}]}',
        b'{"choices": [{"delta": {}, "finish_reason": "stop"}]}',
    ]
    server = FakeServer(trick=lambda number: events)
    with running(server):
        done, row = bench(server, "--endpoint", "/v1/chat/completions")
    assert done.returncode == 0
    assert row["output_lens"] == [2] * 6


def test_a_server_that_takes_no_ids_is_asked_by_text(bench):
    def takes(number, body):
        by_ids = not isinstance(body["prompt"], str)
        return (422, {"detail": "prompt must be text"}) if by_ids else None

    server = FakeServer(takes=takes)
    with running(server):
        done, row = bench(server)
    assert (done.returncode, row["prompts"]) == (0, "text")
    assert done.stderr == (
        "tvr: prompts are text, as the server refuses token ids: HTTP 422: prompt must be text\n"
    )
    assert all(len(body["prompt"].split()) == 5 for body in server.bodies[2:])
    assert len({body["prompt"] for body in server.bodies[-6:]}) == 6


def test_a_server_that_knows_no_more_than_openais_is_asked_plainly(bench):
    def takes(number, body):
        return (400, "no") if "continuous_usage_stats" in body["stream_options"] else None

    server = FakeServer(takes=takes, chunk_tokens=4)
    with running(server):
        done, row = bench(server)
    assert (done.returncode, done.stderr, row["prompts"]) == (0, "", "token ids")
    assert row["output_lens"] == [8] * 6


def test_a_chat_is_asked_by_messages(bench):
    server = FakeServer()
    with running(server):
        done, row = bench(server, "--endpoint", "/v1/chat/completions", "--ignore-eos")
    assert (done.returncode, done.stderr, row["completed"]) == (0, "", 6)
    body = server.bodies[-1]
    assert body["path"] == "/v1/chat/completions"
    assert [message["role"] for message in body["messages"]] == ["user"]
    assert body["ignore_eos"] is True


def test_what_is_asked_for_is_sent_and_the_key_is_not_kept(bench, tmp_path):
    server = FakeServer()
    with running(server):
        bench(server, "--api-key", "secret", "--vocab-size", "50")
    assert set(server.keys) == {"Bearer secret"}
    assert "secret" not in (tmp_path / "s.json").read_text()
    body = server.bodies[-1]
    assert (body["model"], body["max_tokens"], body["stream"]) == ("small", 8, True)
    assert body["stream_options"]["include_usage"] is True
    assert "ignore_eos" not in body
    assert all(token < 50 for body in server.bodies for token in body["prompt"])


def test_an_answer_that_is_no_stream_is_told_as_such():
    whole = {"choices": [{"text": "a"}]}
    server = FakeServer(takes=lambda number, body: (200, whole))
    with running(server):
        line = refused_here("bench", "serve", "--base-url", server.url, *SIZES)
    assert line.endswith("the stream ended without a token, and is application/json")


def interrupted(server, file, *, when):
    """Run the benchmark, two requests at a time, and interrupt it when `when()` holds."""
    with running(server):
        process = subprocess.Popen(
            [
                *[sys.executable, "-m", "tvr", "bench", "serve", "--base-url", server.url],
                *[*SIZES, "--max-concurrency", "2", "--json", str(file)],
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        end = time.monotonic() + 60
        while not when() and time.monotonic() < end:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    return stdout


def test_an_interrupt_loses_no_answer(tmp_path):
    server, file = FakeServer(first_s=0.4, gap_s=0.001), tmp_path / "s.json"
    # A first request, then two at a time: when the sixth comes, at least three are answered.
    stdout = interrupted(server, file, when=lambda: len(server.bodies) >= 6)
    results = json.loads(file.read_text())
    (row,) = results["rows"]
    assert results["header"]["interrupted"]
    assert (row["num_prompts"], row["failed"]) == (6, 0)
    assert 3 <= row["completed"] < 6
    assert row["output_lens"] == [8] * row["completed"]
    left = 6 - row["completed"]
    assert f"interrupted: {left} of 6 requests were not answered" in stdout


def test_an_interrupt_before_an_answer_writes_nothing(tmp_path):
    server, file = FakeServer(first_s=5.0), tmp_path / "s.json"
    assert interrupted(server, file, when=lambda: len(server.bodies) == 1) == ""
    assert not file.exists()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("model", [(), ("--model", "small")])
def test_a_server_that_is_not_there_is_one_line(model):
    url = f"http://127.0.0.1:{free_port()}"
    line = refused_here("bench", "serve", "--base-url", url, *SIZES, *model)
    assert url in line
    assert "connect" in line.lower()


def test_a_model_that_is_not_there_is_one_line():
    said = {"error": {"message": "The model `x` does not exist.", "code": 404}}
    server = FakeServer(takes=lambda number, body: (404, said))
    with running(server):
        line = refused_here("bench", "serve", "--base-url", server.url, *SIZES, "--model", "x")
    assert line.endswith("first request: HTTP 404: The model `x` does not exist.")
    assert len(server.bodies) == 1


def test_a_prompt_that_is_always_refused_is_one_line_with_the_first_reason():
    server = FakeServer(takes=lambda number, body: (400, f"too long, {number}"))
    with running(server):
        line = refused_here("bench", "serve", "--base-url", server.url, *SIZES)
    assert line.endswith("did not serve a first request: HTTP 400: too long, 0")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--num-prompts", "0"], "--num-prompts is 0; it must be at least 1"),
        (["--num-prompts", "99999999999"], "of memory are free; ask for fewer or shorter ones"),
        (["--max-concurrency", "0"], "--max-concurrency is 0"),
        (["--request-rate", "0"], "--request-rate is 0; it must be above 0, or inf"),
        (["--request-rate", "nan"], "--request-rate is nan"),
        (["--base-url", "localhost:1"], "'localhost:1' must be http:// or https:// and a host"),
        (["--base-url", "http://"], "--base-url 'http://' must be http:// or https:// and a host"),
        (["--base-url", "http://x:y"], "http://x:y cannot be asked: Invalid port"),
        (["--endpoint", "v1"], "--endpoint 'v1' must begin with a slash"),
        (["--percentile-metrics", "ttft,x"], "--percentile-metrics 'x' is not known; known: ttft"),
        (["--metric-percentiles", "101"], "--metric-percentiles '101' is no list of numbers"),
        (["--goodput", "ttft"], "--goodput 'ttft' is no limit; give NAME:MS"),
        (["--goodput", "itl:3"], "--goodput 'itl:3' is no limit"),
        (["--goodput", "ttft:nan"], "--goodput 'ttft:nan' is no limit"),
        (["tpot:20"], "'tpot:20' stands alone; limits come behind --goodput"),
        (["--json", "nowhere/x.json"], "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_ends_with_2(options, says):
    assert says in refused_here("bench", "serve", "--base-url", "http://x.invalid", *options)


def test_without_the_client_one_line_says_what_to_install(monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "httpx2" else find_spec(name)
    )
    line = refused_here("bench", "serve", "--base-url", "http://x.invalid")
    assert "needs httpx2, which is not installed; pip install 'tvr[bench]'" in line


def test_two_loads_are_compared(tmp_path):
    files = []
    for gap_s in (0.01, 0.03):
        files.append(tmp_path / f"{gap_s}.json")
        with running(FakeServer(gap_s=gap_s)) as server:
            run_here("bench", "serve", "--base-url", server.url, *SIZES, "--json", files[-1])
    done = run_here("bench", "compare", *files)
    assert (done.returncode, done.stderr) == (0, "")
    ratios = {line.split()[0]: float(line.split()[3]) for line in done.stdout.splitlines()[5:]}
    assert 2 < ratios["median_tpot_ms"] < 4
    assert ratios["output_throughput"] < 1 < ratios["duration"]
    assert {"p99_itl_ms", "mean_ttft_ms", "request_throughput"} <= set(ratios)
