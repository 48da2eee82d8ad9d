"""Cells are measured where results are right, and nowhere else; nothing is left out silently."""

from __future__ import annotations

import json

import pytest
import torch

from support.benches import CPU, rows_of, small_cell
from support.fakes import fake
from support.fault import Fault, faulty
from support.faults import FAULTS
from tvr.backends.torch_ref import plugin
from tvr.bench.comparison import MOST_SETS, num_sets
from tvr.bench.op_cells import op_cells
from tvr.bench.peer import Peer
from tvr.bench.rows import failed
from tvr.conformance.subject import Subject
from tvr.contract import OPS, BoundOp, Box

ATTENTION_FIELDS = (
    *("backend", "op", "dtype", "head_dim", "num_heads", "num_kv_heads", "block_size", "batch"),
    *("ctx", "us", "tb_s", "p10_us", "p90_us", "bytes", "mode", "launches", "samples", "sets"),
)


def stores_k_as_v(right, spec, a):
    return right(v=a["k"])


def writes_but_the_last_row(right, spec, a):
    kept = a["out"][-1].clone()
    right()
    a["out"][-1] = kept
    return a["out"]


def planted(op, name):
    return next(fault for fault in FAULTS if (fault.op, fault.name) == (op, name))


WRONG = [
    planted("rms_norm", "casts_after_the_weight"),
    planted("add_rms_norm", "norms_the_unrounded_sum"),
    planted("rope", "pairs_neighbours"),
    planted("rope", "counts_positions_from_zero"),
    planted("kv_write", "swaps_k_and_v"),
    Fault(check="", op="rope_kv_write", fault=stores_k_as_v),
    planted("silu_mul", "swaps_gate_and_up"),
    planted("linear", "accumulates_in_the_activation_dtype"),
    planted("argmax", "searches_half_the_vocabulary"),
    planted("attention_decode", "misses_token_16"),
    planted("attention_decode", "maps_heads_by_repeat"),
    planted("attention_decode", "ignores_the_table_order"),
    planted("attention_decode", "leaves_out_the_scale"),
    planted("attention_prefill", "forgets_the_causal_mask"),
    planted("attention_prefill", "drops_the_last_row"),
    Fault(check="", op="silu_mul", fault=writes_but_the_last_row),
]


def binding(op, bind):
    """A backend of one op, for every dtype."""
    box = Box(dtypes=("float32", "float16", "bfloat16"), devices=("cpu",))
    return fake("mine", {op: [box]}, bind={op: bind})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", OPS)
def test_the_reference_is_right_and_gets_a_number_at_every_op(op, dtype):
    cell = small_cell(op, dtype)
    (row,) = rows_of(cell, plugin)
    assert "error" not in row
    assert row["us"] > 0
    assert row["p10_us"] <= row["us"] <= row["p90_us"]
    assert row["samples"] >= 20
    assert row["tb_s"] == pytest.approx(cell.num_bytes / row["us"] / 1e6, abs=1e-4)
    assert not failed([row])


@pytest.mark.parametrize("fault", WRONG, ids=lambda fault: f"{fault.op}-{fault.name}")
def test_a_wrong_backend_gets_an_error_and_no_number(fault):
    right, wrong = rows_of(small_cell(fault.op), plugin, faulty(fault))
    assert right["us"] > 0
    assert wrong["us"] is None
    assert wrong["tb_s"] is None
    assert wrong["error"]
    assert failed([right, wrong])


def searches_the_second_half(right, spec, a):
    half = spec.vocab_size // 2
    return right(logits=a["logits"][:, half:]).add_(half)


@pytest.mark.parametrize(
    "fault",
    [
        planted("argmax", "searches_half_the_vocabulary"),
        planted("argmax", "takes_the_last_of_equals"),
        Fault(check="", op="argmax", fault=searches_the_second_half),
    ],
    ids=lambda fault: fault.name,
)
def test_of_a_single_row_half_of_a_vocabulary_is_missed(fault):
    """Where the largest logits were at random places, one such backend in four got a number."""
    (cell,) = op_cells(["argmax"], dtype="bfloat16", rows=(1,), megabytes=0, on_cpu=True)
    right, wrong = rows_of(cell, plugin, faulty(fault))
    assert right["us"] > 0
    assert wrong["us"] is None


def test_what_is_off_is_named_with_its_place_and_limit():
    (row,) = rows_of(small_cell("silu_mul"), faulty(planted("silu_mul", "swaps_gate_and_up")))
    assert row["error"].startswith("out[0, 0] is ")
    assert " within " in row["error"]
    fault = planted("attention_decode", "leaves_out_the_scale")
    (row,) = rows_of(small_cell("attention_decode"), faulty(fault))
    assert row["error"].startswith("sequence 0: relative Frobenius error ")


def test_a_backend_that_raises_has_its_words_and_the_others_go_on():
    def bind(spec, device):
        raise RuntimeError("no such\nkernel")

    first, second = rows_of(small_cell("silu_mul"), binding("silu_mul", bind), plugin)
    assert first["error"] == "RuntimeError: no such kernel"
    assert second["us"] > 0


def test_no_memory_is_said():
    def bind(spec, device):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    (row,) = rows_of(small_cell("silu_mul"), binding("silu_mul", bind))
    assert row["error"] == "out of memory: tried to allocate 9 GiB"


def test_no_memory_of_a_cpu_is_said():
    """There torch has no error of its own for it."""

    def bind(spec, device):
        torch.empty(1 << 60, dtype=torch.uint8)

    (row,) = rows_of(small_cell("silu_mul"), binding("silu_mul", bind))
    assert row["error"].startswith("out of memory: ")


def test_a_failure_while_it_is_timed_costs_the_number():
    calls = []

    def bind(spec, device):
        right = plugin.tvr_bind_silu_mul(spec=spec, device=device)

        def run(x, *, out):
            calls.append(None)
            if len(calls) > 10:
                raise RuntimeError("worn out")
            return right.run(x, out=out)

        return BoundOp(run=run)

    first, second = rows_of(small_cell("silu_mul"), binding("silu_mul", bind), plugin)
    assert first["error"] == "RuntimeError: worn out"
    assert second["us"] > 0


def test_what_is_not_declared_is_skipped_with_the_reason_and_is_no_failure():
    backend = binding("silu_mul", lambda spec, device: None)
    skipped, row = rows_of(small_cell("argmax"), backend, plugin)
    assert skipped["skipped"] == "does not implement argmax"
    assert "error" not in skipped
    assert not failed([skipped, row])
    assert failed([skipped])  # nothing at all was measured


def test_a_declared_op_that_is_not_bound_fails():
    (row,) = rows_of(small_cell("silu_mul"), binding("silu_mul", lambda spec, device: None))
    assert "returned None" in row["error"]


def test_layers_share_one_plan_and_have_memory_of_their_own():
    plans, queries = [], set()

    def bind(spec, device):
        right = plugin.tvr_bind_attention_decode(spec=spec, device=device)

        def run(q, k_cache, v_cache, step, *, scale, out, lse=None):
            queries.add((q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()))
            return right.run(q, k_cache, v_cache, step, scale=scale, out=out, lse=lse)

        return BoundOp(run=run, plan=plans.append)

    cell = small_cell("attention_decode")
    (row,) = rows_of(cell, binding("attention_decode", bind))
    assert row["us"] > 0
    (step,) = plans
    assert step.seq_lens_cpu == [cell.ctx] * cell.batch
    blocks = step.block_table.flatten().tolist()
    assert sorted(blocks) == list(range(len(blocks)))
    assert blocks != sorted(blocks)
    assert len(queries) == row["sets"]
    for places in zip(*queries, strict=True):
        assert len(set(places)) == row["sets"]


def test_rows_of_attention_have_the_documented_fields():
    decode, prefill = (
        rows_of(small_cell(op), plugin)[0] for op in ("attention_decode", "attention_prefill")
    )
    assert (*decode, *prefill) == (*ATTENTION_FIELDS, "tflop_s") * 2
    assert json.loads(json.dumps(decode)) == decode
    assert (decode["mode"], decode["sets"]) == ("eager", 2)


def test_sets_outgrow_the_cache_three_times_between_two_reads():
    assert num_sets(10**6, 60 * 10**6) == 181
    assert num_sets(500 * 10**6, 60 * 10**6) == 2
    assert num_sets(8192, 60 * 10**6) == MOST_SETS
    assert num_sets(8192, 0) == 2


def test_a_peer_on_the_cpu_takes_no_stream():
    assert Peer(Subject(plugin, CPU)).name == "torch"
