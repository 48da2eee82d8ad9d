"""Calls of ops on tables by row: in a model's hands, kept in a file, and judged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tvr.backends.torch_ref import plugin
from tvr.conformance.binding import Binding, step_of
from tvr.conformance.bounds import exact
from tvr.conformance.cases import cases
from tvr.conformance.checks_sample import allowed_in
from tvr.conformance.inputs import make_call
from tvr.conformance.record import Record
from tvr.conformance.row_tables import TABLES, as_run_takes_them
from tvr.conformance.shadow_file import load, replay, save
from tvr.conformance.snapshot import call_of, take
from tvr.conformance.verdict import Comparison, find_fault
from tvr.contract import DeviceFacts

OPS = ("prepare_step", "sample")


def call_and_bound(op):
    case = max(cases(op, "smoke"), key=lambda case: case.num_tokens)
    bound = getattr(plugin, f"tvr_bind_{op}")(spec=case.spec, device=DeviceFacts(type="cpu"))
    return make_call(case, torch.device("cpu")), bound


def judged(call, change=lambda found: None):
    """The fault in a call's right results, `change`d."""
    _, bound = call_and_bound(call.spec.op)
    ran = call.replace(**{name: x.clone() for name, x in call.written.items()})
    Binding(bound, exact(step_of(ran)), torch.device("cpu"))(ran)
    reference = {name: x.clone() for name, x in ran.written.items()}
    change(ran)
    return find_fault(
        Comparison(call=call, found=ran.written, reference=reference, rounding="twice")
    )


def test_what_a_model_passes_is_the_call_with_its_tables_one_by_one():
    call, _ = call_and_bound("sample")
    args = as_run_takes_them(call.args)
    live = call_of(call.spec, (args.pop("logits"),), args)
    assert live.args.keys() == call.args.keys()
    assert all(live[name] is call[name] for name in TABLES)


@pytest.mark.parametrize("op", OPS)
def test_a_snapshot_keeps_what_tables_held_before(op):
    call, bound = call_and_bound(op)
    snapshot = take(call)
    before = {name: call[name].clone() for name in ("last_token", "counts", "block_table")
              if name in call.args}  # fmt: skip
    bound.run(**as_run_takes_them(call.args))
    assert snapshot.changed_input(call) is None
    for name, table in before.items():
        assert torch.equal(snapshot.call[name], table)


@pytest.mark.parametrize("op", OPS)
def test_a_call_that_was_kept_is_made_again_from_its_file(op, tmp_path):
    call, bound = call_and_bound(op)
    snapshot = take(call)
    bound.run(**as_run_takes_them(call.args))
    found = {name: x.clone() for name, x in call.written.items()}
    record = Record(
        snapshot=snapshot,
        bounds=exact(step_of(call)),
        found=found,
        reference=found,
        finding="nothing",
    )
    save(record, tmp_path / "call.safetensors")
    assert load(tmp_path / "call.safetensors").snapshot.call.args.keys() == call.args.keys()
    assert replay(tmp_path / "call.safetensors", plugin).outcome == "passed"


def set_to(name, index, value):
    def change(call):
        call[name][index] = value

    return change


@pytest.mark.parametrize(
    ("op", "name", "index"),
    [
        ("prepare_step", "slot_mapping", (1,)),
        ("prepare_step", "step_block_table", (1, 0)),
        ("prepare_step", "block_table", (2, 3)),
        ("sample", "out", (3,)),
        ("sample", "last_token", (0,)),
        ("sample", "counts", (2, 5)),
    ],
)
def test_a_wrong_element_is_named(op, name, index):
    call, _ = call_and_bound(op)
    assert judged(call) is None
    fault = judged(call, set_to(name, index, 12345))
    assert (fault.output, fault.index, fault.found) == (name, index, 12345)


def test_ids_past_the_end_of_a_sequence_may_be_anything():
    call, _ = call_and_bound("prepare_step")
    call["entries"][1] = torch.tensor([0, 0, -1])
    assert judged(call, set_to("step_block_table", (1, -1), 12345)) is None


def test_a_token_is_right_on_either_side_of_where_the_nucleus_ends():
    call, _ = call_and_bound("sample")
    spec = replace(call.spec, vocab_size=4)
    logits = torch.zeros(len(call["out"]), 4)
    off = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0, "temperature": 1.0, "top_p": 0.5}
    tables = {name: torch.full_like(call[name], value) for name, value in off.items()}
    tables["top_k"], tables["max_gap"] = call["top_k"] * 0 + 4, call["max_gap"] * 0 + torch.inf
    call = replace(call.replace(logits=logits, counts=call["counts"][:, :4], **tables), spec=spec)
    allowed = allowed_in(call)
    row = next(i for i, tokens in enumerate(allowed) if len(tokens) == 2)
    for token in range(4):

        def take_it(ran, token=token):
            ran["out"][row] = ran["last_token"][ran["rows"][row]] = token

        assert (judged(call, take_it) is None) == (token in allowed[row])
