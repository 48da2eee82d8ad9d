"""What check_backend finds, and that it can find something: every check catches a fault."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from support.fakes import CPU
from support.faults import FAULTS, faulty
from support.faults_contract import CONTRACT_FAULTS, GPU_FAULTS, GRAPH_FAULTS
from support.faults_engine import ENGINE_FAULTS
from tvr.backends.torch_ref import plugin
from tvr.conformance import CHECKS, check_backend, format_results
from tvr.conformance.case import LEVELS
from tvr.conformance.cases import cases
from tvr.contract import OPS, BackendInfo, BoundOp, Box
from tvr.errors import BackendUnavailable, ConfigError, PluginError
from tvr.hookspecs import hookimpl


def _with_hooks(**hooks):
    """The reference backend with other hooks in place of, or beside, its own."""
    names = {name: value for name, value in vars(plugin).items() if name.startswith("tvr_")}
    return SimpleNamespace(**names | {name: hookimpl(hook) for name, hook in hooks.items()})


def _with_boxes(op, *boxes):
    info = plugin.tvr_backend_info()
    info = replace(info, ops={**info.ops, op: boxes})
    return _with_hooks(tvr_backend_info=lambda: info)


#: What no CPU has, or no op of the reference.
MISSING = re.compile(
    r"binds \w+ without (plan|workspace_bytes|plan or workspace_bytes)|is not declared cuda_graph"
    r"|is not declared plan_in_graph|(graphs|streams) need a CUDA device|needs two CUDA devices"
)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("op", OPS)
def test_the_reference_keeps_every_claim_with_any_seed(op, seed):
    results = check_backend(plugin, ops=[op], seed=seed)
    assert not any(r.failed for r in results), format_results(results)
    # Nothing is drawn for claims that need what few cases have: a huge pool, a long context.
    skips = {r.detail for r in results if r.outcome == "skipped" and r.case != "drawn"}
    assert all(map(MISSING.fullmatch, skips)), f"the reference declares everything: {skips}"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check}-{fault.name}")
def test_a_planted_fault_is_caught_by_the_check_named_for_it(fault):
    results = check_backend(
        faulty(fault), ops=[fault.op], checks=[fault.check], level=fault.level, max_examples=0
    )
    assert any(r.failed and r.check == fault.check for r in results), format_results(results)


def test_every_check_has_a_fault_that_it_catches():
    declaration = {"declared_support_is_bound"}  # the next two tests
    elsewhere = (*CONTRACT_FAULTS, *GRAPH_FAULTS, *GPU_FAULTS, *ENGINE_FAULTS)  # have own tests
    caught = {fault.check for fault in (*FAULTS, *elsewhere)}
    assert caught | declaration == {check.name for check in CHECKS}


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
    backend = SimpleNamespace(
        tvr_backend_info=hookimpl(lambda: info),
        tvr_bind_attention_decode=hookimpl(lambda spec, device: None),
    )
    results = check_backend(backend, max_examples=0)
    assert [(r.op, r.check) for r in results if r.failed] == [
        ("attention_decode", "declared_op_is_checked")
    ]


def test_an_undeclared_case_is_skipped_with_the_reason():
    only_bf16 = Box(dtypes=["bfloat16"], devices=["cpu"], flags=frozenset({"deterministic"}))
    results = check_backend(_with_boxes("argmax", only_bf16), ops=["argmax"], max_examples=0)
    reasons = {r.detail for r in results if r.outcome == "skipped"}
    assert {r for r in reasons if not MISSING.fullmatch(r)} == {
        "dtype float32 is not among bfloat16",
        "dtype float16 is not among bfloat16",
        "is not declared batch_invariant",
        "dtype float32 is not among bfloat16; is not declared batch_invariant",
        "dtype float16 is not among bfloat16; is not declared batch_invariant",
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
        ({"ops": []}, "none of the checks asked for"),
        ({"checks": []}, "none of the checks asked for"),
        ({"ops": ["rope"], "checks": ["needle_is_found"]}, "none of the checks asked for"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(arguments, message):
    with pytest.raises(ConfigError, match=message):
        check_backend(plugin, **arguments)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (object(), "does not implement tvr_backend_info"),
        (_with_hooks(tvr_prove=lambda device: []), "hook tvr_prove is not known"),
        (_with_hooks(tvr_bind_rope=lambda spec, device=None: None), "device has a default"),
    ],
)
def test_an_object_that_tvr_would_not_load_is_refused(backend, message):
    with pytest.raises(PluginError, match=message):
        check_backend(backend)


def test_a_backend_is_told_its_configuration_and_may_be_a_class():
    class Backend:
        @hookimpl
        def tvr_backend_info(self):
            info = plugin.tvr_backend_info()
            return replace(info, ops={"argmax": info.ops["argmax"]})

        @hookimpl
        def tvr_configured(self, config):
            self.threads = config["options"].get("mine", {}).get("threads", 128)

        @hookimpl
        def tvr_bind_argmax(self, spec, device):
            assert self.threads == 128
            return plugin.tvr_bind_argmax(spec=spec, device=device)

    results = check_backend(Backend, ops=["argmax"])
    assert not any(r.failed for r in results), format_results(results)


def test_a_selection_of_checks_is_no_complaint_about_the_other_ops():
    for checks in (["needle_is_found"], ["declared_support_is_bound"]):
        results = check_backend(plugin, checks=checks, max_examples=0)
        assert {r.check for r in results} == set(checks)
        assert not any(r.failed for r in results), format_results(results)


def test_a_check_of_two_specs_is_skipped_where_the_second_is_not_declared():
    info = plugin.tvr_backend_info()
    info = replace(info, ops={"attention_prefill": info.ops["attention_prefill"]})
    backend = SimpleNamespace(
        tvr_backend_info=hookimpl(lambda: info),
        tvr_bind_attention_prefill=plugin.tvr_bind_attention_prefill,
    )
    results = check_backend(
        backend, checks=["decode_continues_prefill"], ops=["attention_prefill"], max_examples=0
    )
    assert {(r.outcome, r.detail) for r in results} == {
        ("skipped", "does not implement attention_decode")
    }


def _counting_workspace(clear):
    """A norm that keeps a count in its workspace and needs it to be zero at the start."""

    def bind(spec, device):
        right, state = plugin.tvr_bind_rms_norm(spec=spec, device=device), {}

        def run(x, weight, *, eps, out):
            right.run(x, weight, eps=eps, out=out)
            out += state["count"][:1]
            state["count"] += 0 if clear else 1
            return out

        return BoundOp(
            run=run,
            workspace_bytes=lambda bounds: 4,
            attach=lambda workspace: state.update(count=workspace.view(torch.int32)),
        )

    return _with_hooks(tvr_bind_rms_norm=bind)


@pytest.mark.parametrize("clear", [True, False])
def test_a_workspace_is_as_the_call_before_left_it(clear):
    results = check_backend(
        _counting_workspace(clear), ops=["rms_norm"], checks=["runs_are_bit_equal"]
    )
    assert all(r.failed != clear for r in results), format_results(results)


@pytest.mark.parametrize("op", OPS)
def test_the_plan_of_every_op_is_given_a_step(op):
    steps = []

    def bind(spec, device):
        right = getattr(plugin, f"tvr_bind_{op}")(spec=spec, device=device)
        return replace(right, plan=steps.append)

    results = check_backend(
        _with_hooks(**{f"tvr_bind_{op}": bind}), ops=[op], checks=["empty_batch_is_accepted"]
    )
    assert not any(r.failed for r in results), format_results(results)
    for step in steps:
        assert step.cu_seqlens_q[-1] == step.num_tokens
        assert len(step.seq_lens) == len(step.seq_lens_cpu) == step.num_seqs
    assert 0 in {step.num_tokens for step in steps}


def test_one_bound_op_with_a_plan_for_two_specs_fails():
    shared = replace(
        plugin.tvr_bind_argmax(spec=cases("argmax", "smoke")[0].spec, device=CPU),
        plan=lambda step: None,
    )
    backend = _with_hooks(tvr_bind_argmax=lambda spec, device: shared)
    results = check_backend(backend, ops=["argmax"], checks=["largest_logit_wins"])
    assert any("must be new for each spec" in r.detail for r in results if r.failed)


def test_a_backend_that_exits_fails_and_an_interrupt_passes_through():
    def exits(logits, *, out):
        raise SystemExit(3)

    def interrupted(logits, *, out):
        raise KeyboardInterrupt

    def check(run):
        backend = _with_hooks(tvr_bind_argmax=lambda spec, device: BoundOp(run=run))
        return check_backend(backend, ops=["argmax"], checks=["largest_logit_wins"])

    assert {r.detail for r in check(exits)} == {"raised SystemExit: 3"}
    with pytest.raises(KeyboardInterrupt):
        check(interrupted)


def test_case_names_are_unique_and_levels_add_up():
    for op in OPS:
        names = {level: [case.name for case in cases(op, level)] for level in LEVELS}
        assert len(names["full"]) == len(set(names["full"]))
        assert set(names["smoke"]) <= set(names["quick"]) <= set(names["full"])
        assert names["smoke"]


def test_every_check_states_its_claim():
    assert all(check.claim.endswith(".") for check in CHECKS), [c.claim for c in CHECKS]
