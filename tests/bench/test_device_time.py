"""The device's time for a decode step: a tape in place of CUDA's graphs, real ones on a GPU."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch

from support import graph_safe
from support.engines import (
    all_blocks_came_back,
    engine,
    greedy,
    prompts_of,
    save_shape,
    tokens_of,
)
from support.graphed import graphed
from tvr.bench import engine_device
from tvr.bench.engine_device import decode_device_ms
from tvr.conformance.ledger import CheckFailed

PROMPTS = prompts_of([20, 20, 20])
OUTPUT_LEN = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("model"))


class ThisThread:
    """Runs steps in the thread that submits them, as on a GPU, where it launches them."""

    def submit(self, step):
        future = Future()
        try:
            future.set_result(step())
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self):
        """Nothing is running."""


@pytest.fixture
def measured(monkeypatch):
    """Measure with a stand-in for events, which lets `look` see before and behind each launch."""

    def measure(llm, prompts=PROMPTS, output_len=OUTPUT_LEN, look=lambda: None, **sampling):
        @torch.inference_mode()
        def between(run, count, launches, stream):
            look()
            for _ in range(count + 1):
                run()
                look()
            return [1000.0 * launches + i for i in range(count)]

        llm._runner._worker.shutdown()
        llm._runner._worker = ThisThread()
        monkeypatch.setattr(engine_device, "between_events", between)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
        return decode_device_ms(llm, prompts, output_len, sampling)

    return measure


def pools(llm):
    return torch.stack([cache for pair in llm._runner._kv_cache.layers for cache in pair])


@pytest.mark.parametrize("backend", [graph_safe.backend, graph_safe.plans_on_the_host])
def test_it_launches_the_step_in_the_middle_and_leaves_no_trace(checkpoint, measured, backend):
    seen = []

    with graphed(checkpoint, backend) as llm:
        right = tokens_of(llm.generate(PROMPTS, greedy(OUTPUT_LEN)))
        inputs = llm._runner.graphs.decodes._inputs

        def look():
            lens, slots = inputs._seq_lens[:4].tolist(), inputs._slot_mapping[:3].tolist()
            seen.append((lens, slots, pools(llm)))

        assert measured(llm, look=look) == [10.0, 10.001, 10.002, 10.003, 10.004]
        assert not llm.has_unfinished_requests()
        assert all_blocks_came_back(llm)
        assert tokens_of(llm.generate(PROMPTS, greedy(OUTPUT_LEN))) == right
    first = seen[0]
    # Half of 12 tokens of answer are there, and the step behind them is in flight.
    assert first[0] == [20 + OUTPUT_LEN // 2] * 3 + [0]
    assert len(seen) == 7
    for lens, slots, pool in seen[1:]:
        assert (lens, slots) == first[:2]
        changed = (pool != first[2]).movedim(3, 2).flatten(1, 2).any(-1).any(-1).any(0)
        assert set(changed.nonzero().flatten().tolist()) <= set(slots)
    assert any(not pool.equal(first[2]) for *_, pool in seen[1:])


def test_where_steps_are_no_graphs_there_is_nothing_to_time(checkpoint, measured):
    with engine(checkpoint, device="cpu") as llm:
        assert measured(llm) == []
        assert sum(llm.stats()[f"num_{how}_steps"] for how in ("graph", "eager")) == 0


def test_tokens_that_no_graph_chooses_are_not_timed_without_their_choice(checkpoint, measured):
    with graphed(checkpoint, graph_safe.backend) as llm:
        assert measured(llm, temperature=0.8, seed=1) != []
        assert measured(llm, logit_bias={5: 1.0}) == []
        assert measured(llm) != []


def test_requests_that_never_decode_together_are_not_timed(checkpoint, measured):
    """The first ends before the last, whose prompt waits for room in a step, has begun."""
    with graphed(checkpoint, graph_safe.backend, max_num_batched_tokens=16) as llm:
        assert measured(llm, prompts_of([16] * 4), output_len=20) != []
        assert measured(llm, prompts_of([16] * 4), output_len=2) == []


def test_a_request_that_fails_is_told_and_none_stays(checkpoint, measured, monkeypatch):
    with graphed(checkpoint, graph_safe.backend) as llm:
        monkeypatch.setattr(llm._runner.graphs.decodes, "tokens", lambda packed: 1 / 0)
        with pytest.raises(CheckFailed, match="ZeroDivisionError"):
            measured(llm)
        assert not llm.has_unfinished_requests()
        assert all_blocks_came_back(llm)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["pycuda", "triton"])
def test_a_gpu_is_timed_and_serves_on(checkpoint, backend):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with engine(checkpoint, backend=backend, device="cuda", dtype="float32") as llm:
        right = tokens_of(llm.generate(PROMPTS, greedy(OUTPUT_LEN)))
        found = decode_device_ms(llm, PROMPTS, OUTPUT_LEN, {})
        assert len(found) == 5
        assert all(0.001 < ms < 100 for ms in found)
        assert tokens_of(llm.generate(PROMPTS, greedy(OUTPUT_LEN))) == right
