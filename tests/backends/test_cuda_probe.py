"""What the CUDA backend says it lacks on a machine."""

from __future__ import annotations

import sys

import pytest
import torch

from support.cli import refused_here, run_here
from support.fake_nvcc import fake_nvcc
from tvr.backends.pycuda_raw import nvcc as nvcc_module
from tvr.backends.pycuda_raw.probe import why_unavailable
from tvr.contract import DeviceFacts


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine without a GPU, PyCUDA and nvcc."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setitem(sys.modules, "pycuda.driver", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CUDA_HOME", "CUDA_PATH", "TVR_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nvcc_module, "distributions", lambda **kwargs: [])
    return tmp_path


def test_all_that_is_missing_is_told_at_once(bare):
    no_device, no_pycuda, no_nvcc = why_unavailable(DeviceFacts(type="cuda"))
    assert no_device == f"runs on CUDA devices, and torch {torch.__version__} sees none"
    assert no_pycuda.startswith("pycuda cannot be imported (")
    assert no_nvcc.startswith("no usable nvcc: not on PATH; ")
    fake_nvcc(bare)
    assert why_unavailable(DeviceFacts(type="cuda")) == [no_device, no_pycuda]


def test_on_another_device_that_is_the_one_reason(bare, monkeypatch):
    cpu = DeviceFacts(type="cpu", name="CPU")
    (reason,) = why_unavailable(cpu)
    assert reason.endswith(" sees none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_unavailable(cpu) == ["runs on CUDA devices; this one is cpu"]


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_tvr_backends_explains_for_a_gpu_that_is_not_there(device, bare):
    done = run_here("backends", "--explain", "--device", device)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    for begin in ("runs on CUDA devices", "pycuda cannot be imported", "no usable nvcc"):
        assert sum(line.startswith(f"pycuda: {begin}") for line in lines) == 1
    assert any(line.startswith(f"note: device '{device}' was asked for") for line in lines)
    assert "rms_norm: nobody" in lines
    assert "no usable nvcc" in refused_here("backends", "--device", device, "--backend", "pycuda")
