"""What the Triton backend says it lacks on a machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tvr.backends.triton import launch
from tvr.backends.triton.plugin import INFO
from tvr.backends.triton.probe import why_unavailable
from tvr.contract import DTYPES, DeviceFacts, RmsNormSpec, why_not

CPU = DeviceFacts(type="cpu", name="CPU")
H200 = DeviceFacts(type="cuda", index=0, name="H200", sm=90)


@pytest.fixture
def interpreted(monkeypatch):
    """As if TRITON_INTERPRET were set, without setting it: kernels are made at import."""
    monkeypatch.setattr(launch, "is_interpreted", lambda: True)


def test_an_nvidia_gpu_is_all_it_needs():
    assert why_unavailable(H200) == []


def test_a_missing_triton_is_the_one_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for device in (CPU, H200):
        assert why_unavailable(device) == ["Triton is not installed: pip install 'tvr[triton]'"]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert why_unavailable(CPU) == ["Triton is not made for darwin, only for Linux"]


def test_without_a_gpu_it_wants_the_interpreter():
    (reason,) = why_unavailable(CPU)
    assert reason.endswith("set TRITON_INTERPRET=1")
    assert why_unavailable(DeviceFacts(type="cuda")) == ["no CUDA device is here"]


def test_the_interpreter_is_for_the_cpu(interpreted):
    assert why_unavailable(CPU) == []
    (reason,) = why_unavailable(H200)
    assert reason.startswith("TRITON_INTERPRET is set")


def test_an_older_gpu_is_refused_by_its_number():
    turing = DeviceFacts(type="cuda", index=0, name="T4", sm=75)
    assert why_unavailable(turing) == ["needs sm_80 or newer, the device is sm_75"]


def test_bf16_on_a_cpu_is_passed_over_with_a_reason():
    """NumPy has no bfloat16: the interpreter would give garbage."""
    specs = {dtype: RmsNormSpec(dtype=dtype, hidden_size=64) for dtype in DTYPES}
    assert why_not(INFO, specs["float32"], CPU) == why_not(INFO, specs["float16"], CPU) == []
    (reason,) = why_not(INFO, specs["bfloat16"], CPU)
    assert reason == "dtype bfloat16 is not among float32, float16"
    assert why_not(INFO, specs["bfloat16"], H200) == []


def test_hooks_and_declarations_need_no_triton():
    """Without it the backend is listed with its ops, and why it cannot run."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _BLOCKED],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "pip install 'tvr[triton]'" in done.stdout


_BLOCKED = """
import sys
sys.modules["triton"] = None
from tvr.backends.triton import plugin
from tvr.contract import OPS, DeviceFacts
assert set(plugin.tvr_backend_info().ops) == set(OPS)
print(plugin.tvr_probe(DeviceFacts(type="cpu")))
"""
