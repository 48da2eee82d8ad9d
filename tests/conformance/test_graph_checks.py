"""The checks of graphs and streams: with a tape for a graph on the CPU, with real ones on CUDA."""

from __future__ import annotations

import weakref

import pytest
import torch

from support import graph_safe, tape
from support.faults_contract import GPU_FAULTS, GRAPH_FAULTS, faulty
from tvr.backends.torch_ref import plugin
from tvr.conformance import checks_graph, checks_stream, format_results, graphs
from tvr.conformance.ledger import CheckFailed
from tvr.conformance.suite import check_backend
from tvr.contract import OPS

GRAPH_CHECKS = [check.name for check in checks_graph.CHECKS]
STREAM_CHECKS = [check.name for check in checks_stream.CHECKS]

#: Enough for each claim, and few, for the tape is slow.
CASES = {
    "attention_decode": ("attention_decode-edges-float32", "attention_decode-lse-float16"),
    "attention_prefill": ("attention_prefill-chunks-float32", "attention_prefill-lse-float16"),
}

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """A device on which graphs can be had, in name at least."""
    if request.param == "cpu":
        monkeypatch.setattr(graphs, "capture", tape.capture)
        monkeypatch.setattr(graphs, "why_not", lambda backend: [])
    elif not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


def run(backend, op, checks, device):
    cases = CASES.get(op)
    return check_backend(
        backend, ops=[op], checks=checks, cases=cases, device=device, max_examples=0
    )


@pytest.mark.parametrize("op", OPS)
def test_a_backend_that_reads_the_device_alone_keeps_every_claim(op, device):
    results = run(graph_safe.backend(), op, GRAPH_CHECKS, device)
    assert not any(r.failed for r in results), format_results(results)
    assert {r.detail for r in results if r.outcome == "skipped"} <= {
        "is not declared batch_invariant"
    }


@pytest.mark.parametrize("fault", GRAPH_FAULTS, ids=lambda f: f"{f.check}-{f.op}-{f.name}")
def test_a_planted_fault_is_caught_by_the_check_named_for_it(fault, device):
    results = run(faulty(fault), fault.op, [fault.check], device)
    assert any(r.failed for r in results), format_results(results)


def _details(name, device):
    (fault,) = (f for f in GRAPH_FAULTS if f.name == name)
    return {r.detail for r in run(faulty(fault), fault.op, [fault.check], device) if r.failed}


@pytest.mark.parametrize(
    "name", ["launches_where_no_capture_sees_it", "runs_once_for_the_same_addresses"]
)
def test_an_empty_graph_is_called_by_its_name(name, device):
    details = _details(name, device)
    # CUDA itself may notice that a capture would have to wait for another stream.
    known = ["writes no output", *(["cannot be captured"] if device == "cuda" else [])]
    assert details
    assert all(any(text in detail for text in known) for detail in details), details


@pytest.mark.parametrize("name", ["asks_the_device_for_the_longest", "plans_in_its_run"])
def test_waiting_for_the_device_in_a_capture_is_called_by_its_name(name, device):
    assert all("cannot be captured" in detail for detail in _details(name, device))


@NEEDS_CUDA
@pytest.mark.gpu
@pytest.mark.parametrize("op", OPS)
def test_a_right_backend_follows_streams_and_devices(op):
    results = run(graph_safe.backend(), op, STREAM_CHECKS, "cuda")
    assert not any(r.failed for r in results), format_results(results)
    assert any(r.outcome == "passed" for r in results)


@NEEDS_CUDA
@pytest.mark.gpu
@pytest.mark.parametrize("fault", GPU_FAULTS, ids=lambda f: f"{f.check}-{f.op}-{f.name}")
def test_a_fault_of_stream_or_device_is_caught(fault):
    results = run(faulty(fault), fault.op, [fault.check], "cuda")
    if torch.cuda.device_count() < 2 and fault.check == "another_device_may_be_current":
        assert {r.outcome for r in results} == {"skipped"}
        pytest.skip("needs two CUDA devices")
    assert any(r.failed for r in results), format_results(results)


def test_a_tape_works_on_the_tensors_of_its_capture():
    x, out = torch.zeros(4), torch.zeros(4)

    def double_then_add_one():
        torch.mul(x, 2, out=out)
        out[1:].add_((x + 1)[1:])

    recorded = tape.capture(double_then_add_one, None)
    x.copy_(torch.arange(4.0))
    out.fill_(-9)
    recorded.replay()
    assert out.tolist() == [0, 4, 7, 10]


@pytest.mark.parametrize(
    "reads", [torch.Tensor.item, torch.Tensor.tolist, torch.nonzero, lambda x: x[x > 0], bool]
)
def test_a_tape_refuses_what_waits_for_the_device(reads):
    with pytest.raises(CheckFailed, match="cannot be captured"):
        tape.capture(lambda: reads(torch.ones(1)), None)


def test_what_is_captured_lives_as_long_as_its_graph(monkeypatch):
    """A graph knows addresses only: packed weights that were freed would be anybody's memory."""
    alive = []

    class AddressesOnly:
        def __init__(self, fn):
            self._fn = weakref.ref(fn)

        def replay(self):
            fn = self._fn()
            alive.append(fn is not None)
            if fn is not None:
                fn()

    monkeypatch.setattr(graphs, "capture", lambda fn, device, stream=None: AddressesOnly(fn))
    monkeypatch.setattr(graphs, "why_not", lambda backend: [])
    check_backend(
        plugin,
        ops=["linear"],
        checks=["replay_reads_the_data_of_its_step"],
        cases=["linear-invariant-float32"],
    )
    assert alive
    assert all(alive)
