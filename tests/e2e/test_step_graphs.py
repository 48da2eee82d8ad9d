"""Steps of decodes as graphs: a tape in place of CUDA's on the CPU, real ones on a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from support import graph_safe
from support.device_lengths import rerun
from support.engines import (
    all_blocks_came_back,
    drain,
    engine,
    greedy,
    prompts_of,
    save_shape,
    tokens_of,
)
from support.graphed import graphed
from tvr import SamplingParams
from tvr.core.decode_graphs import graph_sizes
from tvr.core.graph_capture import obstacles, partial_obstacles
from tvr.core.runner import ModelRunner
from tvr.errors import KernelError
from tvr.hookspecs import hookimpl

LENGTHS = [5, 16, 17, 40, 33, 1, 64, 20, 47]
PARAMS = [
    greedy(24),
    greedy(40),
    SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True),
    greedy(5),
    greedy(30, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=1.0, top_k=5, seed=3, max_tokens=33, ignore_eos=True),
    greedy(2),
    greedy(24, logits_processors=[lambda ids, logits: logits.roll(1)]),
    greedy(18),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("model"))


BACKENDS = {"plan_inside": graph_safe.backend, "plan_outside": graph_safe.plans_on_the_host}


@pytest.fixture(scope="module")
def eager(checkpoint):
    with engine(checkpoint, backend="graph_safe", plugins=[graph_safe.backend()]) as llm:
        return llm.generate(prompts_of(LENGTHS), PARAMS)


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("lag", [0, 1])
def test_graphs_give_the_tokens_of_eager_steps(checkpoint, eager, backend, lag):
    with graphed(checkpoint, backend, max_lag=lag) as llm:
        outputs = llm.generate(prompts_of(LENGTHS), PARAMS)
        assert tokens_of(outputs) == tokens_of(eager)
        for mine, right in zip(outputs, eager, strict=True):
            for found, wanted in zip(
                mine.outputs[0].logprobs or [], right.outputs[0].logprobs or [], strict=True
            ):
                assert list(found) == list(wanted)
        stats = llm.stats()
        assert stats["num_graph_steps"] >= 40
        assert stats["num_eager_steps"] == 0  # mixed steps are graphs as well
        assert all_blocks_came_back(llm)


def test_a_step_with_more_chunks_than_any_graph_has_room_for_is_eager(checkpoint, monkeypatch):
    monkeypatch.setattr("tvr.core.chunk_graphs._CHUNKS", 2)
    with graphed(checkpoint, graph_safe.backend) as llm:
        llm.generate(prompts_of([5, 5]), greedy(2))
        assert llm.stats()["num_eager_steps"] == 0
        llm.generate(prompts_of([5, 5, 5], seed=1), greedy(2))
        assert llm.stats()["num_eager_steps"] == 1


def test_prefill_that_cannot_be_captured_leaves_decodes_their_graphs(checkpoint):
    def without_prefill():
        right = graph_safe.backend()
        ops = dict(graph_safe.INFO.ops)
        boxes = ops["attention_prefill"]
        ops["attention_prefill"] = [replace(box, flags=frozenset()) for box in boxes]
        info = replace(graph_safe.INFO, ops=ops)
        return SimpleNamespace(**vars(right) | {"tvr_backend_info": hookimpl(lambda: info)})

    with graphed(checkpoint, without_prefill) as llm:
        llm.generate(prompts_of([20, 30]), greedy(6))
        stats = llm.stats()
        assert stats["num_eager_steps"] == 1
        assert stats["num_graph_steps"] == 5


@pytest.mark.parametrize("lag", [0, 1])
def test_preempted_and_aborted_requests_do_not_show(checkpoint, lag):
    """Rows change hands between replays, and blocks go to others."""
    prompts = prompts_of(LENGTHS, seed=1)
    with engine(checkpoint, backend="graph_safe", plugins=[graph_safe.backend()]) as llm:
        right = tokens_of(llm.generate(prompts, greedy(40)))
    with graphed(
        checkpoint, graph_safe.backend, max_lag=lag, num_blocks=14, max_model_len=128
    ) as llm:
        for i, prompt in enumerate(prompts):
            llm.add_request(str(i), prompt, greedy(40))
            llm.add_request(f"aborted {i}", prompt[::-1], greedy(40))
            llm.step()
            llm.abort(f"aborted {i}")
        found = drain(llm)
        assert [found[str(i)].outputs[0].token_ids for i in range(len(prompts))] == right
        assert llm.stats()["num_eager_steps"] == 0
        assert all_blocks_came_back(llm)


def test_a_step_larger_than_every_graph_is_launched_eagerly(checkpoint, monkeypatch):
    monkeypatch.setattr("tvr.core.decode_graphs.MAX_SIZE", 4)
    with graphed(checkpoint, graph_safe.backend) as llm:
        llm.generate(prompts_of([3] * 6), greedy(8))
        assert llm.stats()["num_eager_steps"] == 7  # that of the prompts is a graph
        llm.generate(prompts_of([3] * 4), greedy(8))
        assert llm.stats()["num_eager_steps"] == 7


def test_padding_writes_no_slot_and_no_row(checkpoint):
    """Three decodes in a graph of four: the pool and the tables hold what three left."""
    prompts = prompts_of([3, 9, 20])
    with graphed(checkpoint, graph_safe.backend, enable_prefix_caching=False) as llm:
        for cache in llm._runner._kv_cache.layers:
            for pool in cache:
                pool.fill_(7.0)
        llm.generate(prompts, greedy(9))
        keys = llm._runner._kv_cache.layers[0][0]
        touched = int((keys != 7.0).any(dim=(1, 3)).sum())
        # The last token of each is never computed.
        assert touched == sum(len(p) for p in prompts) + 3 * (9 - 1)


def test_a_backend_that_waits_in_its_run_is_named(checkpoint):
    def faulty():
        def change(bound, spec):
            if spec.op != "silu_mul":
                return bound

            def run(x, *, out):
                assert x.sum().item() is not None
                return bound.run(x, out=out)

            return replace(bound, run=run)

        return graph_safe.backend(change)

    with (
        pytest.raises(KernelError, match=r"captured.*by silu_mul of backend 'graph_safe'"),
        graphed(checkpoint, faulty),
    ):
        pass


def test_sizes_rise_and_end_at_the_largest_step():
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(32) == [1, 2, 4, 8, 16, 24, 32]
    assert graph_sizes(256)[-2:] == [248, 256]
    assert graph_sizes(10_000)[-2:] == [496, 512]


def without_flag(op):
    """Return `graph_safe` with an op that is not declared to be captured."""
    right = graph_safe.backend()
    ops = dict(graph_safe.INFO.ops)
    ops[op] = [replace(box, flags=box.flags - {"cuda_graph"}) for box in ops[op]]
    info = replace(graph_safe.INFO, ops=ops)
    return SimpleNamespace(**vars(right) | {"tvr_backend_info": hookimpl(lambda: info)})


def test_where_sample_cannot_be_captured_torch_chooses_behind_the_graph(checkpoint, eager):
    with graphed(checkpoint, lambda: without_flag("sample")) as llm:
        assert tokens_of(llm.generate(prompts_of(LENGTHS), PARAMS)) == tokens_of(eager)
        assert llm.stats()["num_eager_steps"] == 0
        (reason,) = partial_obstacles(llm.parts.ops)
        assert reason.startswith("the choice of tokens that are not greedy: sample of backend")
        assert obstacles(llm.config, llm.parts.ops) == []


@pytest.mark.parametrize(
    ("op", "stops"), [("argmax", False), ("attention_prefill", False), ("rms_norm", True)]
)
def test_only_an_op_of_the_graph_stops_the_graph(checkpoint, op, stops):
    backend = without_flag(op)
    with engine(checkpoint, backend="graph_safe", plugins=[backend], device="cpu") as llm:
        assert bool(obstacles(llm.config, llm.parts.ops)) is stops


@pytest.mark.parametrize("tokens", [17, 40, 130])
def test_every_step_of_a_graph_is_within_the_bounds_that_ops_are_given(checkpoint, tokens):
    """Padding included, also for an op that plans the whole step; chunks have coarser sizes in
    graphs with decodes than in graphs without."""
    bounds, seen = [], []

    def planned():
        def change(bound, spec):
            if spec.op != "silu_mul":
                return bound
            return replace(
                bound,
                plan=lambda step: seen.append((step.num_seqs, step.num_tokens)),
                workspace_bytes=lambda given: bounds.append(given) or 0,
                attach=lambda workspace: None,
            )

        return graph_safe.backend(change)

    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": tokens}
    with graphed(checkpoint, planned, capture=rerun, **sizes) as llm:
        llm.generate(prompts_of(LENGTHS), greedy(6))
        assert llm.stats()["num_eager_steps"] == 0
    (given,) = set(bounds)
    assert max(seqs for seqs, _ in seen) <= given.max_num_seqs
    assert max(tokens for _, tokens in seen) <= given.max_num_tokens


def test_a_prompts_logprobs_come_from_a_graph_with_decodes_beside_it(checkpoint):
    prompts = prompts_of([30, 20, 25])
    params = [greedy(12), greedy(6, prompt_logprobs=2), greedy(3, prompt_logprobs=0)]

    def served(llm):
        llm.add_request("first", prompts[0], params[0])
        for _ in range(3):
            llm.step()
        for i in (1, 2):
            llm.add_request(str(i), prompts[i], params[i])
        found = drain(llm)
        return [
            [list(entry) for entry in found[str(i)].prompt_logprobs if entry] for i in (1, 2)
        ], {name: output.outputs[0].token_ids for name, output in found.items()}

    with engine(checkpoint, backend="graph_safe", plugins=[graph_safe.backend()]) as llm:
        right = served(llm)
    with graphed(checkpoint, graph_safe.backend) as llm:
        assert served(llm) == right
        assert llm.stats()["num_eager_steps"] == 0


def test_no_step_is_launched_ahead_of_one_that_could_not_be(checkpoint, monkeypatch):
    """It would build on blocks that the failed one should have entered in the table."""
    with graphed(checkpoint, graph_safe.backend, max_lag=1) as llm:
        launched, submit = [], ModelRunner.submit

        def fails_once(runner, *args):
            launched.append(len(llm._in_flight))
            if len(launched) == 1:
                raise RuntimeError("worn out")
            return submit(runner, *args)

        monkeypatch.setattr(ModelRunner, "submit", fails_once)
        (output,) = llm.generate(prompts_of([20]), greedy(4))
        assert output.outputs[0].finish_reason == "error"
        assert launched == [0]
        assert llm.generate(prompts_of([20]), greedy(4))[0].outputs[0].finish_reason == "length"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["pycuda", "triton"])
def test_an_engine_on_a_gpu_captures_its_steps(checkpoint, backend, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    prompts = prompts_of(LENGTHS)
    settings = {"backend": backend, "device": "cuda", "dtype": "float32", "max_num_seqs": 8}
    with engine(checkpoint, **settings, enforce_eager=True) as llm:
        right = tokens_of(llm.generate(prompts, PARAMS))
        assert llm.stats()["num_graph_steps"] == 0
        assert llm.parts.eager_reasons == ("enforce_eager is set",)
    with engine(checkpoint, **settings) as llm:
        assert tokens_of(llm.generate(prompts, PARAMS)) == right
        stats = llm.stats()
        assert stats["num_eager_steps"] == 0
        assert stats["num_graph_steps"] >= 40
        assert llm.parts.eager_reasons == ()
