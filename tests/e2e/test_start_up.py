"""What an engine with graphs does before its first request, and what it sets aside for them."""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch

from support import graph_safe
from support.engines import greedy, prompts_of, save_shape, tokens_of
from support.graphed import bounds_of, capture_for, graphed, roomy
from support.tape import Tape
from tvr import LLM
from tvr.backends.torch_ref import plugin
from tvr.cli.stats import print_stats
from tvr.contract import BackendInfo, DeviceFacts
from tvr.core.engine_config import EngineConfig
from tvr.core.host_memory import GIB
from tvr.core.largest_steps import DRIVER_PIECE_BYTES, LargestSteps, measured_pool_bytes
from tvr.core.memory import DeviceMemory, cuda_budget
from tvr.core.profile import WARM_UP_DECODES, warm_up
from tvr.errors import KernelError
from tvr.hookspecs import hookimpl

MIB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_shape(tmp_path_factory.mktemp("model"))


def recorded(fn):
    """Return a tape of one run, as a capture is one."""
    tape = Tape()
    with tape:
        fn()
    return tape


def largest_steps_of(llm, *, with_graphs):
    runner = llm._runner
    return LargestSteps(
        runner._model,
        runner._ops,
        runner._step_ops,
        bounds_of(llm),
        llm.limits.block_size,
        torch.device("cpu"),
        with_graphs=with_graphs,
    )


def forwards_of(llm, monkeypatch):
    """Return a list that grows by the tokens of each step whose layers are launched op by op."""
    model, tokens = llm._runner._model, []
    run_layers = model.run_layers

    def counted(batch, kv_cache):
        tokens.append(len(batch.input_ids))
        run_layers(batch, kv_cache)

    monkeypatch.setattr(model, "run_layers", counted)
    return tokens


def test_each_graph_costs_its_capture_and_each_size_one_eager_run(checkpoint, monkeypatch):
    """Kernels differ by size, so each runs before it is captured; none does so a second time."""
    with roomy(checkpoint, graph_safe.backend) as llm:
        forwards = forwards_of(llm, monkeypatch)
        capture_for(llm, recorded)
        decodes, chunks = (1, 2, 4, 8), [(0, 16), (0, 32), (0, 64), (8, 64)]
        # Eager and captured; of decodes, a graph with tokens and one with logits.
        expected = [3 * [n] for n in decodes] + [2 * [n + tokens] for n, tokens in chunks]
        assert sorted(forwards) == sorted(n for some in expected for n in some)
        forwards.clear()
        warm_up(llm._runner, bounds_of(llm), llm.limits.block_size, llm.limits.num_blocks)
        assert forwards == []
        assert llm.stats()["num_eager_steps"] == 0
        assert llm.stats()["num_graph_steps"] == 2 * (1 + len(decodes))


def test_sizes_without_a_graph_are_warmed_up_op_by_op(checkpoint, monkeypatch):
    monkeypatch.setattr("tvr.core.decode_graphs.MAX_SIZE", 2)
    with graphed(checkpoint, graph_safe.backend) as llm:
        forwards = forwards_of(llm, monkeypatch)
        warm_up(llm._runner, bounds_of(llm), llm.limits.block_size, llm.limits.num_blocks)
        assert forwards == [n for n in WARM_UP_DECODES if 2 < n <= 8] * 2


def test_warming_up_through_graphs_leaves_nothing_behind(checkpoint):
    prompts = prompts_of([5, 33, 20])
    with graphed(checkpoint, graph_safe.backend) as llm:
        cold = tokens_of(llm.generate(prompts, greedy(8)))
    with graphed(checkpoint, graph_safe.backend) as llm:
        warm_up(llm._runner, bounds_of(llm), llm.limits.block_size, llm.limits.num_blocks)
        assert tokens_of(llm.generate(prompts, greedy(8))) == cold


def test_the_logger_is_told_how_many_graphs_are_captured(checkpoint, caplog):
    with roomy(checkpoint, graph_safe.backend) as llm, caplog.at_level(logging.INFO, "tvr"):
        capture_for(llm, recorded)
    assert caplog.messages[0] == (
        "capturing CUDA graphs 1/12: a step of 8 decodes and 64 tokens of chunks"
    )
    assert caplog.messages[-1] == "capturing CUDA graphs 12/12: a step of 1 decodes"
    assert len(caplog.messages) == 8  # two graphs of each size of decodes


def test_a_program_that_asked_for_no_progress_sees_nothing_of_it(checkpoint, capfd):
    with graphed(checkpoint, graph_safe.backend):
        pass
    assert capfd.readouterr() == ("", "")


def tensors_of(root):
    """Return the tensors that an object of core holds, by the address of their memory."""
    found, seen, todo = {}, set(), [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, (dict, list, tuple)) or type(thing).__module__.startswith("tvr."):
            todo += gc.get_referents(thing)
    return found


def test_all_that_is_allocated_behind_the_pool_is_there_when_the_peak_is_measured(checkpoint):
    """The inputs and logits of graphs, tables and sampling state: sizes, not estimates."""
    with roomy(checkpoint, graph_safe.backend) as llm:
        kept = tensors_of([llm._runner._model, llm._runner._ops, llm._runner._kv_cache])
        steps = largest_steps_of(llm, with_graphs=True)
        model = tensors_of([llm._runner._model])
        counted = tensors_of([steps._runner, steps._graphs])
        counted = sum(n for at, n in counted.items() if at not in kept) - steps.pool_bytes
        steps.close()
        capture_for(llm, lambda fn: None)
        assert tensors_of([llm._runner._model]) == model  # activations have their room already
        real = tensors_of([llm._runner])
        assert sum(n for at, n in real.items() if at not in kept) == counted
        assert counted > 100_000


class FakeDevice:
    """A GPU's memory by numbers: torch's, and what the driver takes for graphs."""

    def __init__(self, *, total, weights, peak, first_graph, graph):
        self.start = DeviceMemory(total=total, free=total - GIB, reserved=0, allocated=0)
        self.weights, self.peak = weights, peak
        self.first_graph, self.graph = first_graph, graph
        self.num_graphs = 0

    def capture(self, fn):
        fn()
        self.num_graphs += 1

    @property
    def graph_bytes(self):
        return self.first_graph * (self.num_graphs > 0) + self.graph * self.num_graphs

    def memory(self, device=None):
        return DeviceMemory(
            total=self.start.total,
            free=self.start.free - self.weights - self.graph_bytes,
            reserved=self.weights,
            allocated=self.weights,
        )


@pytest.mark.parametrize("with_graphs", [True, False])
@pytest.mark.parametrize(("first_graph", "graph"), [(64 * MIB, 3 * MIB), (0, 0), (500 * MIB, 0)])
def test_an_engine_takes_its_fraction_and_no_more(
    checkpoint, monkeypatch, with_graphs, first_graph, graph
):
    """Graphs are captured when the pool is there; what they take then has been left free."""
    gpu = FakeDevice(
        total=80 * GIB, weights=3 * GIB, peak=5 * GIB, first_graph=first_graph, graph=graph
    )
    config = EngineConfig(memory_fraction=0.5, device="cpu")
    with roomy(checkpoint, graph_safe.backend) as llm:
        runner = llm._runner
        pools = []
        init = LargestSteps.__init__

        def watched(self, *args, **kwargs):
            init(self, *args, **kwargs)
            pools.append(self.pool_bytes)

        monkeypatch.setattr(LargestSteps, "__init__", watched)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: gpu.peak + pools[0])
        monkeypatch.setattr(DeviceMemory, "of", gpu.memory)
        monkeypatch.setattr("tvr.core.largest_steps.CudaCapture", lambda stream: gpu.capture)
        pool = measured_pool_bytes(
            config,
            gpu.start,
            runner._model,
            runner._ops,
            runner._step_ops,
            bounds_of(llm),
            torch.device("cpu"),
            with_graphs=with_graphs,
        )
        gpu.num_graphs = 0  # those were not kept
        if with_graphs:
            capture_for(llm, gpu.capture)
            assert gpu.num_graphs == 12
        left = cuda_budget(config, gpu.start) - gpu.peak - gpu.graph_bytes - pool
        assert cuda_budget(config, gpu.start) == 40 * GIB
        # One piece of the driver's, in every graph there may be.
        assert 0 <= left <= with_graphs * 12 * DRIVER_PIECE_BYTES


def test_a_graph_that_cannot_be_captured_is_found_before_there_is_a_pool(checkpoint):
    def fails(fn):
        raise RuntimeError("operation not permitted when stream is capturing")

    with roomy(checkpoint, graph_safe.backend) as llm:
        steps = largest_steps_of(llm, with_graphs=True)
        with pytest.raises(KernelError, match="a step of 8 decodes and 64 tokens of chunks cannot"):
            steps.graph_bytes(fails, lambda: DeviceMemory(total=1, free=1, reserved=0, allocated=0))
        steps.close()


class CpuAsGpu(DeviceFacts):
    """Facts of a GPU that torch knows as the CPU."""

    def __str__(self):
        return "cpu"


@pytest.fixture
def as_on_a_gpu(checkpoint, monkeypatch):
    """Load an engine as on a GPU: sized by its largest steps, with tapes for graphs, warmed up."""

    def load(gpu, **settings):
        def capture(fn):
            gpu.num_graphs += 1
            return recorded(fn)

        facts = CpuAsGpu(type="cuda", name="a GPU of numbers", sm=90)
        monkeypatch.setattr("tvr.core.loader.device_facts", lambda device: facts)
        for place in ("loader", "largest_steps"):
            monkeypatch.setattr(f"tvr.core.{place}.CudaCapture", lambda stream: capture)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: gpu.peak)
        monkeypatch.setattr(DeviceMemory, "of", gpu.memory)
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "dtype": "float32"}
        served = {"backend": "graph_safe", "plugins": [graph_safe.backend()]}
        return LLM(checkpoint, **{**sizes, **served, **settings})

    return load


def test_an_engine_on_a_gpu_is_measured_then_captured_then_warmed_up(
    checkpoint, as_on_a_gpu, caplog
):
    prompts = prompts_of([5, 33, 20])
    with roomy(checkpoint, graph_safe.backend) as llm:
        right = tokens_of(llm.generate(prompts, greedy(8)))
    gpu = FakeDevice(total=4 * GIB, weights=0, peak=0, first_graph=MIB, graph=MIB)
    with caplog.at_level(logging.INFO, "tvr"), as_on_a_gpu(gpu) as llm:
        doing = [text.split(" CUDA graphs")[0] for text in caplog.messages]
        steps = [name for name, _ in groupby(doing)]
        assert steps[:3] == ["measuring", "set aside for", "capturing"]
        assert steps[3].startswith("the engine takes ")
        assert tokens_of(llm.generate(prompts, greedy(8))) == right
        assert llm.stats()["num_eager_steps"] == 0
        assert llm.parts.eager_reasons == ()
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize(
    ("settings", "reasons", "num_graphs"),
    [({"enforce_eager": True}, ("enforce_eager is set",), 0), ({"num_blocks": 40}, (), 9)],
)
def test_nothing_is_measured_that_is_not_wanted(as_on_a_gpu, settings, reasons, num_graphs):
    gpu = FakeDevice(total=4 * GIB, weights=0, peak=0, first_graph=MIB, graph=MIB)
    with as_on_a_gpu(gpu, **settings) as llm:
        assert llm.parts.eager_reasons == reasons
        assert gpu.num_graphs == num_graphs


def fused_alone(flags):
    """Return a package's backend that has only `fused_linear`, and declares `flags` for it."""
    boxes = [replace(b, flags=frozenset(flags)) for b in graph_safe.INFO.ops["fused_linear"]]
    info = BackendInfo(name="fastprod", abi=(1, 0), ops={"fused_linear": boxes})
    return SimpleNamespace(
        tvr_backend_info=hookimpl(lambda: info), tvr_bind_fused_linear=plugin.tvr_bind_fused_linear
    )


@pytest.mark.parametrize(
    ("flags", "settings", "server"),
    [
        ((), {}, "graph_safe"),
        (("cuda_graph",), {}, "fastprod"),
        ((), {"enforce_eager": True}, "fastprod"),
    ],
)
def test_a_fused_product_never_costs_decodes_their_graphs(
    as_on_a_gpu, capsys, flags, settings, server
):
    """It saves a few launches a layer; a graph saves all of them."""
    gpu = FakeDevice(total=4 * GIB, weights=0, peak=0, first_graph=MIB, graph=MIB)
    plugins = [fused_alone(flags), graph_safe.backend()]
    with as_on_a_gpu(gpu, backend="auto", plugins=plugins, **settings) as llm:
        assert llm.parts.ops.served()["fused_linear"] == [server]
        (output,) = llm.generate(prompts_of([5]), greedy(4))
        assert (llm.stats()["num_eager_steps"] == 0) is (settings == {})
        print_stats(llm, output, 1)
    lines = [" ".join(line.split()) for line in capsys.readouterr().err.splitlines()]
    told = [line for line in lines if line.startswith("op fused_linear")]
    assert told[0] == f"op fused_linear {server}"
    assert told[1:] == [
        "op fused_linear not fastprod: it is not declared cuda_graph and its parts are, so with it "
        "steps could not be CUDA graphs"
    ] * (server == "graph_safe")


def test_blocks_get_what_graphs_will_leave(as_on_a_gpu):
    def gpu(left):
        found = FakeDevice(total=20 * GIB, weights=0, peak=0, first_graph=MIB, graph=MIB // 4)
        found.peak = cuda_budget(EngineConfig(), found.start) - left
        return found

    with as_on_a_gpu(gpu(GIB), enforce_eager=True) as llm:
        block_bytes = llm.limits.block_bytes
    # Three graphs are measured first, six next, with a piece of the driver's to spare.
    graphs = MIB + 9 * MIB // 4 + DRIVER_PIECE_BYTES
    small_pool = 4 * block_bytes  # of the largest steps: a block for each sequence
    with as_on_a_gpu(gpu(graphs + 20 * block_bytes - small_pool)) as llm:
        assert llm.limits.num_blocks == 20
