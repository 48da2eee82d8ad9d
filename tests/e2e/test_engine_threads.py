"""Many threads and many requests on one engine."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.engines import (
    all_blocks_came_back,
    delays,
    drain,
    engine,
    greedy,
    prompts_of,
    save_shape,
    tokens_of,
)
from tvr import SamplingParams
from tvr.core.scheduler import Scheduler


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[0, 1], ids=["lag0", "lag1"])
def llm(checkpoint, request, monkeypatch):
    with delays(monkeypatch), engine(checkpoint, max_lag=request.param) as llm:
        yield llm


def test_requests_and_aborts_may_come_from_other_threads(llm):
    prompts = prompts_of([20 + i for i in range(12)])
    expected = tokens_of(llm.generate(prompts, greedy(8)))

    def add(first):
        for i in range(first, 12, 3):
            llm.add_request(str(i), prompts[i], greedy(8))
            llm.add_request(f"gone {i}", prompts[i], greedy(100))
            llm.abort(f"gone {i}")

    threads = [threading.Thread(target=add, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    outputs = {}
    while any(t.is_alive() for t in threads) or llm.has_unfinished_requests():
        outputs.update({o.request_id: o for o in llm.step()})
    assert [outputs[str(i)].outputs[0].token_ids for i in range(12)] == expected
    assert all(outputs[f"gone {i}"].outputs[0].finish_reason == "abort" for i in range(12))
    assert all_blocks_came_back(llm)


def test_the_engine_may_be_stepped_in_another_thread(checkpoint):
    (prompt,) = prompts_of([20])
    with engine(checkpoint) as llm:
        expected = tokens_of(llm.generate(prompt, greedy(8)))
        got = []
        thread = threading.Thread(target=lambda: got.extend(llm.generate(prompt, greedy(8))))
        thread.start()
        thread.join()
        assert tokens_of(got) == expected


def test_several_threads_may_generate_and_stream_at_once(llm):
    prompts = prompts_of([20 + i for i in range(8)])
    expected = tokens_of(llm.generate(prompts, greedy(10)))

    def serve(i):
        if i % 2:
            return tokens_of(llm.generate(prompts[i], greedy(10)))[0]
        return [*llm.stream(prompts[i], greedy(10))][-1].outputs[0].token_ids

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(serve, range(8), timeout=60)) == expected
    assert drain(llm) == {}
    assert all_blocks_came_back(llm)


def test_a_late_abort_does_not_end_the_next_request_of_that_id(llm, monkeypatch):
    """A client that goes away as its request ends, and another one that reuses the id."""
    (prompt,) = prompts_of([20])
    for _ in range(3):
        llm.add_request("x", prompt, greedy(8))
        drain(llm)
        llm.abort("x")
        llm.add_request("x", prompt, greedy(8))
        assert drain(llm)["x"].outputs[0].finish_reason == "length"

    update, calls = Scheduler.update_columns, []

    def aborting(*args):
        calls.append(args)
        llm.abort("x")  # still there, and over when the next step begins
        return update(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "update_columns", aborting)
        llm.add_request("x", prompt, greedy(1))
        assert drain(llm)["x"].outputs[0].finish_reason == "length"
    assert calls
    llm.add_request("x", prompt, greedy(8))
    assert drain(llm)["x"].outputs[0].finish_reason == "length"

    llm.add_request("x", prompt, greedy(8))
    llm.abort("x")
    llm.abort("x")
    aborted = drain(llm)["x"]
    assert aborted.outputs[0].finish_reason == "abort"
    assert all_blocks_came_back(llm)


def test_a_stream_may_be_closed_in_the_middle_of_a_step(llm, monkeypatch):
    """The garbage collector closes an abandoned stream wherever it happens to run."""
    kept, lost = prompts_of([20, 33])
    expected = tokens_of(llm.generate(kept, greedy(12)))
    for moment in ("schedule", "update_columns", "add", "finish"):
        stream = llm.stream(lost, greedy(100))
        next(stream)
        llm.add_request("aborted", lost, greedy(100))
        llm.abort("aborted")  # calls `finish` when the next step begins
        function, calls = getattr(Scheduler, moment), []

        def closing(*args, function=function, stream=stream, calls=calls):
            calls.append(args)
            stream.close()
            return function(*args)

        with monkeypatch.context() as patch:
            patch.setattr(Scheduler, moment, closing)
            assert tokens_of(llm.generate(kept, greedy(12))) == expected
        assert calls
        stream.close()
        assert drain(llm).keys() == {"aborted"}
        assert all_blocks_came_back(llm)


def test_ids_of_generate_step_aside_for_the_users(llm):
    (prompt,) = prompts_of([20])
    for i in range(3):
        llm.add_request(f"tvr-{i}", prompt, greedy(4))
    assert len(tokens_of(llm.generate(prompt, greedy(4)))[0]) == 4
    assert drain(llm).keys() == {"tvr-0", "tvr-1", "tvr-2"}


def test_many_requests_leave_nothing_behind(checkpoint):
    """Finished, aborted and stopped ones, alone and with n answers, cached and preempted."""
    prompts = prompts_of([3 + i % 40 for i in range(50)])
    params = [
        SamplingParams(n=1 + i % 2, seed=i, max_tokens=1 + i % 5, presence_penalty=i % 3 / 2)
        for i in range(50)
    ]

    def serve(llm):
        llm.generate(prompts, params)
        for i, prompt in enumerate(prompts):
            llm.add_request(f"request {i}", prompt, params[i])
        llm.step()
        for i in range(0, 50, 3):
            llm.abort(f"request {i}")
        drain(llm)

    # On the CPU: CUDA's caches of pinned memory and events grow as they like.
    with engine(checkpoint, num_blocks=32, device="cpu") as llm:
        for _ in range(3):  # the prefix cache fills, buffers grow to their size
            serve(llm)
        gc.collect()
        tracemalloc.start()
        try:
            serve(llm)
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(5):
                serve(llm)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # 500 requests later; one that stayed would take over 1 KB, its tokens alone 1/4.
        assert after - before < 40_000
        assert all_blocks_came_back(llm)
        tables = (llm._requests, llm._completions, llm._inbox, llm._undelivered, llm._in_flight)
        assert not any(tables)
