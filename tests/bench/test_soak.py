"""benchmarks/soak.py judges what it has seen."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

FILE = Path(__file__).parents[2] / "benchmarks" / "soak.py"
HELD = {"memory_mib": 400.0, "files": 9.0, "threads": 7.0, "requests": 0.0, "kv_use": 0.0}


@pytest.fixture
def soak(monkeypatch):
    spec = importlib.util.spec_from_file_location("soak", FILE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def turns(name, *values):
    return [{**HELD, name: float(value)} for value in values]


def test_what_grows_in_the_second_half_is_a_fault_and_before_is_not(soak):
    assert soak.faults_in(turns("files", 9, 12, 15, 15, 15)) == []
    assert soak.faults_in(turns("files", 9, 9, 9, 9, 10)) == ["files grew from 9.0 to 10.0"]
    assert soak.faults_in(turns("threads", 7, 7, 7, 8, 8)) == ["threads grew from 7.0 to 8.0"]
    assert soak.faults_in(turns("memory_mib", 300, 380, 400, 410, 416)) == []
    assert soak.faults_in(turns("memory_mib", 400, 400, 400, 410, 417)) == [
        "memory_mib grew from 400.0 to 417.0"
    ]


def test_what_is_left_after_any_turn_is_a_fault(soak):
    assert soak.faults_in(turns("kv_use", 0.1, 0, 0)) == ["after turn 1, kv_use is 0.1"]
    assert soak.faults_in(turns("requests", 0, 0, 1)) == ["after turn 3, requests is 1.0"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_server_is_asked_and_a_wrong_answer_is_told(soak, tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "TURN", 30)
    monkeypatch.setattr(soak, "NUM_QUESTIONS", 10)
    right = soak.questions

    def one_is_wrong():
        first, *others = right()
        return [replace(first, answer=[("x", "")]), *others]

    monkeypatch.setattr(soak, "questions", one_is_wrong)
    out = tmp_path / "soak.json"
    assert soak.main([str(out), "--requests", "60", "--clients", "8"]) == 1
    found = json.loads(out.read_text())
    assert len(found["rows"]) == 2
    assert found["header"]["completed_and_equal"] > 30
    wrong = [fault for fault in found["header"]["faults"] if " gave " in fault]
    assert wrong
    assert all("not [('x', '')]" in fault for fault in wrong)
