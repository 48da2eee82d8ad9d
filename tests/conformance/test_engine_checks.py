"""The engine checks pass what is right and catch, in a running model, what is not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from support.device_lengths import go_by_the_device, rerun
from support.fakes import CPU
from support.fault import Fault, faulty
from support.faults_engine import (
    ANOTHER_WAY,
    ENGINE_FAULTS,
    decodes_without_the_new_token,
    sums_in_any_order,
)
from tvr.backends.torch_ref import plugin
from tvr.conformance import engine_model, graphs
from tvr.conformance.engine_checks import CHECKS
from tvr.conformance.engine_model import TinyModel, random_weights
from tvr.conformance.ledger import CheckFailed
from tvr.conformance.margin import measuring, share
from tvr.conformance.model_cases import engine_cases
from tvr.conformance.model_spec import bound_specs, op_specs, why_not_model
from tvr.conformance.subject import Subject
from tvr.contract import OPS, BackendInfo
from tvr.core.ops import OpTable
from tvr.hookspecs import hookimpl

BY_NAME = {check.name: check for check in CHECKS}
GRAPH = "graph_replay_equals_eager"


def serving(*ops, **boxes):
    """The reference's own ops under another name."""
    served = plugin.tvr_backend_info().ops
    info = BackendInfo(name="part", abi=(1, 0), ops={op: boxes.get(op, served[op]) for op in ops})
    hooks = {f"tvr_bind_{op}": getattr(plugin, f"tvr_bind_{op}") for op in ops}
    return SimpleNamespace(tvr_backend_info=hookimpl(lambda: info), **hooks)


class Verdict(NamedTuple):
    """What a check said of a case (None: nothing), and the error as a share of its limit."""

    reason: str | None
    share: float


def run(name, backend, seed=0):
    """What a check says of each smoke case that it applies to."""
    check, found = BY_NAME[name], []
    for case in filter(check.applies, engine_cases("smoke", seed)):
        reason = None
        with measuring() as margin:
            try:
                check.run(Subject(backend, CPU), case)
            except CheckFailed as e:
                reason = str(e)
        found.append(Verdict(reason, share(margin.error or 0.0, margin.limit or 0.0)))
    assert found
    return found


def keeps(name, backend, seed=0):
    return all(verdict.reason is None for verdict in run(name, backend, seed))


@pytest.fixture(autouse=True)
def graphs_on_a_cpu(monkeypatch):
    """A graph that launches again what it has captured."""
    monkeypatch.setattr(graphs, "capture", rerun)
    go_by_the_device(monkeypatch)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", BY_NAME)
def test_the_reference_keeps_every_claim(name, seed):
    assert keeps(name, plugin, seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fault", ANOTHER_WAY, ids=lambda f: f.name)
@pytest.mark.parametrize(
    "name",
    [
        "decode_equals_longer_prefill",
        "cached_keys_ignore_chunking",
        "greedy_tokens_match_reference",
        "half_precision_errs_like_reference",
    ],
)
def test_what_rounds_in_other_places_is_right_too(name, fault, seed):
    assert keeps(name, faulty(fault), seed)


@pytest.mark.parametrize("fault", ENGINE_FAULTS, ids=lambda f: f"{f.check}-{f.name}")
def test_a_planted_fault_is_caught_in_every_dtype_by_the_check_named_for_it(fault):
    verdicts = run(fault.check, faulty(fault))
    assert all(verdict.reason for verdict in verdicts), verdicts
    if fault.check not in ("greedy_tokens_match_reference", "half_precision_errs_like_reference"):
        in_fp32, *_ = verdicts
        assert in_fp32.share > 1000, "a limit as loose as that would hide smaller faults"


def test_every_check_has_a_fault_that_it_catches():
    assert {fault.check for fault in ENGINE_FAULTS} == set(BY_NAME)


@pytest.mark.parametrize("ops", [["rope"], ["attention_decode"], ["rms_norm", "linear"]])
def test_a_backend_with_some_ops_is_tested_with_the_reference_for_the_rest(ops):
    for name in ("decode_equals_longer_prefill", "half_precision_errs_like_reference"):
        assert keeps(name, serving(*ops))


@pytest.mark.parametrize("name", [check for check in BY_NAME if "invariant" not in check])
def test_what_is_not_declared_deterministic_need_not_repeat_its_bits(name):
    fault = Fault("", "linear", sums_in_any_order)
    boxes = [
        replace(box, flags=box.flags - {"deterministic"})
        for box in plugin.tvr_backend_info().ops["linear"]
    ]
    backend = serving("linear", linear=boxes)
    backend.tvr_bind_linear = faulty(fault).tvr_bind_linear
    assert keeps(name, backend)
    if name == "physical_blocks_do_not_matter":  # declared, it would have to
        assert not keeps(name, faulty(fault))


def test_a_fault_of_a_backend_with_one_op_shows():
    fault = Fault("", "attention_decode", decodes_without_the_new_token)
    backend = serving("attention_decode")
    backend.tvr_bind_attention_decode = faulty(fault).tvr_bind_attention_decode
    assert all(verdict.reason for verdict in run("decode_equals_longer_prefill", backend))


def test_an_op_that_is_declared_and_not_bound_is_not_replaced_in_silence():
    backend = serving("attention_decode")
    backend.tvr_bind_attention_decode = hookimpl(lambda spec, device: None)
    for verdict in run("physical_blocks_do_not_matter", backend):
        assert "declares support, but" in verdict.reason


def test_a_graph_that_launches_nothing_fails(monkeypatch):
    def capture(fn, device, stream=None):
        return SimpleNamespace(replay=lambda: None)

    monkeypatch.setattr(graphs, "capture", capture)
    assert all("found nan" in verdict.reason for verdict in run(GRAPH, plugin))


def test_a_graph_needs_a_device_that_has_graphs():
    case = engine_cases("smoke")[0]
    assert BY_NAME[GRAPH].needs(Subject(plugin, CPU), case) == ["graphs need a CUDA device"]


def test_a_backend_with_no_op_of_the_model_has_no_part_in_it():
    spec = engine_cases("smoke")[0].spec
    assert why_not_model(spec, lambda s: ["no"]) == ["serves none of the ops of this model"]
    assert why_not_model(spec, lambda s: [] if s.op == "rope" else ["no"]) == []


def test_a_batch_invariant_model_is_for_backends_that_declare_it_of_all_their_ops():
    spec = replace(engine_cases("smoke")[0].spec, batch_invariant=True)
    plain = {
        op: [replace(box, flags=frozenset()) for box in boxes]
        for op, boxes in plugin.tvr_backend_info().ops.items()
    }
    some = Subject(serving("rope", "silu_mul", silu_mul=plain["silu_mul"]), CPU)
    assert why_not_model(spec, some.why_not) == ["silu_mul: is not declared batch_invariant"]
    assert why_not_model(spec, Subject(serving("rope"), CPU).why_not) == []


def test_the_model_binds_every_op_of_the_contract():
    case = engine_cases("smoke")[0]
    assert {s.op for s in op_specs(case.spec)} == set(OPS)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_specs_that_are_named_are_those_that_core_binds(batch_invariant, monkeypatch):
    asked = set()

    class Table(OpTable):
        def bind(self, spec):
            asked.add(spec)
            return super().bind(spec)

    monkeypatch.setattr(engine_model, "OpTable", Table)
    case = engine_cases("smoke")[0]
    spec = replace(case.spec, batch_invariant=batch_invariant)
    TinyModel(Subject(plugin, CPU), spec, random_weights(case, spec))
    assert asked == set(bound_specs(spec))
