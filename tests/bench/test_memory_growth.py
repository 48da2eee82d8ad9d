"""benchmarks/memory_growth.py judges what it has seen."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "memory_growth.py"


@pytest.fixture(scope="module")
def growth():
    spec = importlib.util.spec_from_file_location("memory_growth", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_growth_after_the_first_turns_is_a_fault_and_before_is_not(growth):
    def turns(*tensors):
        return [{"process": 300.0, "tensors": float(t)} for t in tensors]

    assert growth.faults_in(turns(10, 20, 30, 30, 30)) == []
    assert growth.faults_in(turns(10, 20, 30, 30, 31)) == ["tensors grew from 30.0 to 31.0 MiB"]
    process = [{"process": mib} for mib in (300.0, 350.0, 351.0, 352.0, 370.0)]
    assert growth.faults_in(process) == ["process grew from 351.0 to 370.0 MiB"]


def test_turns_are_served_and_written(growth, tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "TURN", 8)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 128,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    out = tmp_path / "growth.json"
    arguments = [str(out), "--model", str(tmp_path), "--device", "cpu", "--requests", "20"]
    assert growth.main(arguments) == 0
    found = json.loads(out.read_text())
    assert len(found["rows"]) == 3
    assert found["header"]["stats"]["num_used_blocks"] == 0
