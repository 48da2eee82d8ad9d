"""The chain of products: each is judged, each part gets a number, a wrong one gets none."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from support.benches import CPU
from support.fault import faulty
from support.faults import FAULTS
from tvr.backends.torch_ref import plugin
from tvr.bench.peer import Peer
from tvr.conformance.subject import Subject

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "linear_chain.py"


@pytest.fixture
def chain(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("linear_chain", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "linear_chain", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tiny(chain):
    return {"layers": chain.TINY_LAYERS, "linears": chain.TINY_LINEARS}


def test_each_part_of_the_step_gets_a_time_at_each_count_of_rows(chain, tiny, tmp_path, capsys):
    out = tmp_path / "chain.json"
    assert chain.measure([Peer(Subject(plugin, CPU))], CPU, out, **tiny) == 0
    rows = json.loads(out.read_text())["rows"]
    parts = ("step", *chain.KINDS)
    assert [(r["rows"], r["part"]) for r in rows] == [(n, p) for n in chain.ROWS for p in parts]
    assert all(r["us"] > 0 and r["samples"] >= 20 for r in rows)
    step, *kinds = rows[: len(parts)]
    each = {r["part"]: r["bytes"] for r in kinds}
    whole = sum(each[kind] * (1 if kind == "lm_head" else chain.TINY_LAYERS) for kind in each)
    assert step["bytes"] == whole
    printed = capsys.readouterr().out
    assert "torch" in printed
    assert "lm_head" in printed


def test_each_product_takes_the_one_before_and_a_weight_of_its_own(chain, tiny):
    calls = chain.in_order(chain.step_calls(3, torch.device("cpu"), **tiny))
    assert len(calls) == 4 * chain.TINY_LAYERS + 1
    for before, after in itertools.pairwise(calls):
        assert after["x"].data_ptr() == before["out"].data_ptr()
    assert len({call["weight"].data_ptr() for call in calls}) == len(calls)


def test_a_backend_that_is_wrong_gets_an_error_and_no_time(chain, tiny, tmp_path):
    fault = next(f for f in FAULTS if f.name == "accumulates_in_the_activation_dtype")
    right, wrong = (Peer(Subject(obj, CPU)) for obj in (plugin, faulty(fault)))
    wrong.name = "wrong"
    out = tmp_path / "chain.json"
    assert chain.measure([right, wrong], CPU, out, **tiny) == 1
    for row in json.loads(out.read_text())["rows"]:
        assert ("error" in row) == (row["backend"] == "wrong")
        assert (row["us"] is None) == (row["backend"] == "wrong")
