"""The checks of what surrounds a run: each catches its fault, and a right backend keeps them."""

from __future__ import annotations

import pytest
import torch

from support import graph_safe
from support.faults_contract import CONTRACT_FAULTS, faulty
from tvr.backends.torch_ref import plugin
from tvr.conformance import (
    checks_graph,
    checks_plan,
    checks_stream,
    checks_workspace,
    format_results,
)
from tvr.conformance.bounds import LARGE, SMALL, covers, holding
from tvr.conformance.ledger import CheckFailed
from tvr.conformance.suite import check_backend
from tvr.conformance.workspace import Workspace
from tvr.contract import StepMeta

CHECKS = [
    check.name
    for module in (checks_workspace, checks_plan, checks_graph, checks_stream)
    for check in module.CHECKS
]
CPU = torch.device("cpu")

#: Cases that have what the claims need: several splits, short beside long, an lse.
CASES = {
    "attention_decode": ("attention_decode-edges-float32", "attention_decode-lse-float16"),
    "attention_prefill": ("attention_prefill-chunks-float32", "attention_prefill-lse-float16"),
}


@pytest.mark.parametrize("fault", CONTRACT_FAULTS, ids=lambda f: f"{f.check}-{f.op}-{f.name}")
def test_a_planted_fault_is_caught_by_the_check_named_for_it(fault):
    results = check_backend(
        faulty(fault), ops=[fault.op], checks=[fault.check], cases=CASES[fault.op]
    )
    assert any(r.failed for r in results), format_results(results)


@pytest.mark.parametrize("op", CASES)
def test_a_backend_with_plan_and_workspace_keeps_the_claims(op):
    results = check_backend(graph_safe.backend(), ops=[op], checks=CHECKS, cases=CASES[op])
    assert not any(r.failed for r in results), format_results(results)
    assert {r.detail for r in results if r.outcome == "skipped"} == {
        "graphs need a CUDA device",
        "streams need a CUDA device",
        "needs two CUDA devices",
    }


def test_a_workspace_may_shrink_for_larger_bounds():
    """Splits that fill the device are fewer for more sequences: so many times so many falls too."""

    class FillsTheDevice(graph_safe.SplitAttention):
        def workspace_bytes(self, bounds):
            splits = 528 // (bounds.max_num_seqs * self.spec.num_heads)
            return super().workspace_bytes(bounds) + 4096 * bounds.max_num_seqs * splits

    backend = graph_safe.backend(
        lambda bound, spec: FillsTheDevice(spec).bound() if spec.op in CASES else bound
    )
    for op in CASES:
        results = check_backend(backend, ops=[op], checks=CHECKS, cases=CASES[op])
        assert not any(r.failed for r in results), format_results(results)


def test_the_reference_keeps_the_claims_or_says_why_it_has_none():
    results = check_backend(plugin, checks=CHECKS, max_examples=0)
    assert not any(r.failed for r in results), format_results(results)
    reasons = {r.detail for r in results if r.outcome == "skipped"}
    undeclared = {"is not declared cuda_graph", "is not declared plan_in_graph"}
    assert reasons - {"graphs need a CUDA device", *undeclared} == {
        "streams need a CUDA device",
        "needs two CUDA devices",
        *(f"binds {op} without {parts}" for op in plugin.tvr_backend_info().ops
          for parts in ("plan", "workspace_bytes", "plan or workspace_bytes")),
    }  # fmt: skip


def test_an_error_in_a_bind_hook_fails_the_check_instead_of_skipping_it():
    def refuses(bound, spec):
        raise RuntimeError("no such kernel")

    results = check_backend(
        graph_safe.backend(refuses),
        ops=["argmax"],
        checks=["plan_writes_only_the_workspace"],
        max_examples=0,
    )
    assert {r.detail for r in results if r.failed} == {"raised RuntimeError: no such kernel"}


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 4096])
def test_a_workspace_is_zero_aligned_and_shows_a_byte_written_past_either_end(num_bytes):
    for place, what in ((-1, "1 bytes before"), (num_bytes, "1 bytes behind")):
        workspace = Workspace(num_bytes, CPU)
        inside = workspace.inside
        assert inside.numel() == num_bytes
        assert inside.data_ptr() % 512 == 256 or not num_bytes
        assert not inside.any()
        inside.fill_(255)
        workspace.require_intact_bands()
        torch.as_strided(inside, (1,), (1,), inside.storage_offset() + place).fill_(0)
        with pytest.raises(CheckFailed, match=f"{what} its workspace of {num_bytes} bytes"):
            workspace.require_intact_bands()


def _step(num_seqs=1, num_tokens=1, max_q_len=1, max_seq_len=1):
    nothing = torch.zeros(0, dtype=torch.int32)
    return StepMeta(
        block_table=nothing,
        seq_lens=nothing,
        cu_seqlens_q=nothing,
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        max_q_len=max_q_len,
        max_seq_len=max_seq_len,
        seq_lens_cpu=[],
    )


def test_small_steps_get_small_bounds_and_the_largest_are_an_engines():
    assert holding(_step()) is SMALL
    assert holding(_step(num_seqs=9, num_tokens=9)) is LARGE
    assert holding(_step(max_seq_len=131072)) is LARGE
    assert holding(_step(num_tokens=20_000)).max_num_tokens == 20_000
    assert covers(LARGE, SMALL)
    assert not covers(SMALL, LARGE)
    assert (LARGE.max_num_seqs, LARGE.max_seq_len, LARGE.max_q_len) == (256, 131072, 8192)
