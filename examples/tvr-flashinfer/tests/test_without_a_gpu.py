"""What this package hands over to FlashInfer, tested on a CPU against a stand-in for it."""

from __future__ import annotations

import dataclasses
import importlib
import sys

import fake_flashinfer
import pytest
import torch

import tvr_flashinfer
from tvr.conformance import check_backend, format_results
from tvr.contract import AttentionDecodeSpec, AttentionPrefillSpec, Bounds, DeviceFacts, StepMeta

CPU = DeviceFacts(type="cpu")
H200 = DeviceFacts(type="cuda", index=0, sm=90)
SHAPE = {
    "dtype": "bfloat16",
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 64,
    "block_size": 16,
}


@pytest.fixture
def backend(monkeypatch):
    """The package over the stand-in, declared for the CPU too."""
    fake_flashinfer.install(monkeypatch)
    # Imported afresh: these hold on to what they found in `flashinfer`.
    for name in ("attention", "norm"):
        monkeypatch.delitem(sys.modules, f"tvr_flashinfer.{name}", raising=False)
    attention = importlib.import_module("tvr_flashinfer.attention")
    monkeypatch.setattr(attention, "num_sms", lambda device: 132)
    ops = {
        op: [dataclasses.replace(box, devices=("cpu",)) for box in boxes]
        for op, boxes in tvr_flashinfer.INFO.ops.items()
    }
    monkeypatch.setattr(tvr_flashinfer, "INFO", dataclasses.replace(tvr_flashinfer.INFO, ops=ops))
    # Declared, but not to be had here: a graph needs a GPU.
    monkeypatch.delattr(tvr_flashinfer, "tvr_probe")
    return tvr_flashinfer


def step_of(q_lens, kv_lens, table, seq_lens=None):
    return StepMeta(
        block_table=torch.tensor(table, dtype=torch.int32),
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int(),
        num_seqs=len(kv_lens),
        num_tokens=sum(q_lens),
        max_q_len=max(q_lens),
        max_seq_len=max(kv_lens),
        seq_lens_cpu=kv_lens,
    )


def planned(op):
    """Return the op's wrapper, after its workspace was attached."""
    bounds = Bounds(max_num_seqs=8, max_num_tokens=64, max_seq_len=128, max_q_len=64)
    op.attach(torch.zeros(op.workspace_bytes(bounds), dtype=torch.uint8))
    return op._wrapper


def test_every_claim_of_the_contract_holds(backend):
    results = check_backend(backend, ops=list(backend.INFO.ops), max_examples=0)
    assert not any(r.failed for r in results), format_results(results)
    assert {r.op for r in results if r.outcome == "passed"} >= set(backend.INFO.ops)


def test_decode_hands_over_the_used_pages_of_live_sequences(backend):
    from tvr_flashinfer.attention import Decode

    decode = Decode(AttentionDecodeSpec(**SHAPE), CPU)
    wrapper = planned(decode)
    garbage = -1
    table = [[7, 3, garbage], [garbage] * 3, [2, garbage, garbage], [5, 1, 4]]
    decode.plan(step_of([1] * 4, [17, 0, 16, 33], table))
    (plan,) = wrapper.plans
    assert plan["indptr"].tolist() == [0, 2, 3, 6]
    assert plan["indices"].tolist() == [7, 3, 2, 5, 1, 4]
    assert plan["last"].tolist() == [1, 16, 1]
    assert decode._pages.rows.tolist() == [0, 2, 3]


def test_prefill_hands_over_the_rows_that_see_a_key(backend):
    from tvr_flashinfer.attention import Prefill

    prefill = Prefill(AttentionPrefillSpec(**SHAPE), CPU)
    planned(prefill)
    prefill.plan(step_of([5, 0, 3], [2, 20, 40], [[1, -1, -1], [2, 3, -1], [6, 5, 4]]))
    pages = prefill._pages
    assert pages.qo_indptr.tolist() == [0, 2, 5]
    assert pages.kv_indptr.tolist() == [0, 1, 4]
    assert pages.indices.tolist() == [1, 6, 5, 4]
    assert pages.last_page_len.tolist() == [2, 8]
    assert pages.rows.tolist() == [3, 4, 5, 6, 7]


def test_a_step_where_all_rows_see_a_key_is_run_in_place(backend):
    from tvr_flashinfer.attention import Decode

    decode = Decode(AttentionDecodeSpec(**SHAPE), CPU)
    planned(decode)
    decode.plan(step_of([1, 1], [3, 16], [[0], [1]]))
    assert decode._pages.rows is None


def test_nothing_is_planned_for_a_step_without_keys(backend):
    from tvr_flashinfer.attention import Decode

    decode = Decode(AttentionDecodeSpec(**SHAPE), CPU)
    wrapper = planned(decode)
    decode.plan(step_of([1, 1], [0, 0], [[0], [1]]))
    assert wrapper.plans == []


def test_the_probe_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert tvr_flashinfer.tvr_probe(device=CPU) == ["needs a CUDA device, not cpu"]
    (reason,) = tvr_flashinfer.tvr_probe(device=H200)
    assert reason.startswith("flashinfer cannot be imported: ModuleNotFoundError")
