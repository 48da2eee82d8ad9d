"""What check_backend finds, and that it can find something: every check catches a fault."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from support.faults import FAULTS, faulty
from tvr.backends.torch_ref import plugin
from tvr.conformance import CHECKS, check_backend, format_results
from tvr.conformance.cases import LEVELS, cases
from tvr.contract import OPS, BackendInfo, BoundOp, Box
from tvr.errors import BackendUnavailable, ConfigError


def _with_hooks(**hooks):
    names = {name: value for name, value in vars(plugin).items() if name.startswith("tvr_")}
    return SimpleNamespace(**names | hooks)


def _with_boxes(op, *boxes):
    info = plugin.tvr_backend_info()
    info = replace(info, ops={**info.ops, op: boxes})
    return _with_hooks(tvr_backend_info=lambda: info)


@pytest.mark.parametrize("op", OPS)
def test_the_reference_keeps_every_claim(op):
    results = check_backend(plugin, ops=[op])
    assert not any(r.failed for r in results), format_results(results)
    assert not any(r.outcome == "skipped" for r in results), "the reference declares everything"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check}-{fault.name}")
def test_a_planted_fault_is_caught_by_the_check_named_for_it(fault):
    results = check_backend(faulty(fault), ops=[fault.op], checks=[fault.check])
    assert any(r.failed and r.check == fault.check for r in results), format_results(results)


def test_every_check_has_a_fault_that_it_catches():
    declaration = {"declared_support_is_bound"}  # the next two tests
    assert {fault.check for fault in FAULTS} | declaration == {check.name for check in CHECKS}


def test_a_declared_spec_that_is_not_bound_fails():
    backend = _with_hooks(tvr_bind_rope=lambda spec, device: None)
    results = check_backend(backend, ops=["rope"], checks=["declared_support_is_bound"])
    assert results
    assert all(r.failed for r in results)


def test_a_bound_spec_that_is_not_declared_fails():
    only_bf16 = Box(dtypes=["bfloat16"], devices=["cpu"])
    backend = _with_boxes("silu_mul", only_bf16)
    results = check_backend(backend, ops=["silu_mul"], checks=["declared_support_is_bound"])
    assert any(r.failed and "without declaring it" in r.detail for r in results)


def test_a_declared_op_with_no_executed_check_fails():
    out_of_reach = Box(dtypes=["float32"], devices=["cpu"], head_dims=[7])
    info = BackendInfo(name="narrow", abi=(1, 0), ops={"attention_decode": [out_of_reach]})
    backend = SimpleNamespace(tvr_backend_info=lambda: info)
    results = check_backend(backend)
    assert [(r.op, r.check) for r in results if r.failed] == [
        ("attention_decode", "declared_op_is_checked")
    ]


def test_an_undeclared_case_is_skipped_with_the_reason():
    only_bf16 = Box(dtypes=["bfloat16"], devices=["cpu"], flags=frozenset({"deterministic"}))
    results = check_backend(_with_boxes("argmax", only_bf16), ops=["argmax"])
    reasons = {r.detail for r in results if r.outcome == "skipped"}
    assert reasons == {
        "dtype float32 is not among bfloat16",
        "dtype float16 is not among bfloat16",
        "is not declared batch_invariant",
    }


def test_an_exception_in_a_backend_is_its_failure():
    def run(logits, *, out):
        raise MemoryError("out of memory")

    backend = _with_hooks(tvr_bind_argmax=lambda spec, device: BoundOp(run=run))
    results = check_backend(backend, ops=["argmax"], checks=["largest_logit_wins"])
    assert {r.detail for r in results} == {"raised MemoryError: out of memory"}
    assert all(r.failed for r in results)


def test_a_workspace_is_zeroed_aligned_and_attached_before_the_plan_and_the_run():
    seen = []

    def attach(workspace):
        assert workspace.data_ptr() % 256 == 0
        assert not workspace.any()
        seen.append(("attach", workspace.numel()))

    def bind(spec, device):
        right = plugin.tvr_bind_attention_decode(spec=spec, device=device)
        return replace(
            right,
            workspace_bytes=lambda bounds: 1000,
            attach=attach,
            plan=lambda step: seen.append(("plan", step.num_seqs)),
        )

    backend = _with_hooks(tvr_bind_attention_decode=bind)
    results = check_backend(
        backend, ops=["attention_decode"], checks=["query_heads_read_their_kv_head"]
    )
    assert not any(r.failed for r in results), format_results(results)
    assert seen[0] == ("attach", 1000)
    assert seen[1][0] == "plan"


def test_a_probe_that_refuses_stops_the_suite_with_its_reasons():
    backend = _with_hooks(tvr_probe=lambda device: ["no driver", "no compiler"])
    with pytest.raises(BackendUnavailable, match="no driver; no compiler"):
        check_backend(backend)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ops": ["rms_nrom"]}, "unknown op 'rms_nrom'; known: rms_norm"),
        ({"checks": ["nothing"]}, "unknown check 'nothing'"),
        ({"level": "slow"}, "unknown level 'slow'; known: smoke, quick, full"),
        ({"device": "gpu"}, "device 'gpu' is not known"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check_backend(plugin, **arguments)


def test_an_object_without_hooks_is_refused():
    with pytest.raises(ConfigError, match="has no tvr_backend_info"):
        check_backend(object())


def test_case_names_are_unique_and_levels_add_up():
    for op in OPS:
        names = {level: [case.name for case in cases(op, level)] for level in LEVELS}
        assert len(names["full"]) == len(set(names["full"]))
        assert set(names["smoke"]) <= set(names["quick"]) <= set(names["full"])
        assert names["smoke"]


def test_every_check_states_its_claim():
    assert all(check.claim.endswith(".") for check in CHECKS), [c.claim for c in CHECKS]
