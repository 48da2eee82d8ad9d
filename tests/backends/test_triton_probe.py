"""What the Triton backend says it lacks on a machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import numpy
import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tvr[triton]'")

import triton

from tvr.backends.triton import configs, launch
from tvr.backends.triton.plugin import INFO, tvr_configured
from tvr.backends.triton.probe import why_unavailable
from tvr.contract import DTYPES, DeviceFacts, RmsNormSpec, why_not
from tvr.errors import ConfigError

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


def test_an_older_triton_is_refused_everywhere_by_its_number(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.4.0")
    for device in (CPU, H200):
        assert why_unavailable(device) == [
            "needs Triton 3.5 or newer, 3.4.0 is installed: pip install 'triton>=3.5'"
        ]


@pytest.mark.parametrize(
    ("version", "of_numpy", "works"),
    [
        ("3.5.1", "2.3.5", True),
        ("3.5.1", "2.4.0", False),
        ("3.6.0+git9844da95", "2.10.0", False),
        ("3.6.0", "1.26.4", True),
        ("3.7.0", "2.4.6", True),
        ("3.10.0", "3.0.0", True),
    ],
)
def test_the_interpreter_of_an_older_triton_is_refused_with_a_newer_numpy(
    interpreted, monkeypatch, version, of_numpy, works
):
    """It ends in a TypeError at the first kernel that loads a number."""
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(numpy, "__version__", of_numpy)
    assert why_unavailable(CPU) == (
        []
        if works
        else [
            f"the interpreter of Triton {version} fails with NumPy 2.4 and newer, {of_numpy} is "
            "installed: pip install 'numpy<2.4', or 'triton>=3.7'"
        ]
    )


def test_on_a_gpu_any_numpy_will_do(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    monkeypatch.setattr(numpy, "__version__", "2.4.6")
    assert why_unavailable(H200) == []


@pytest.mark.parametrize("text", [None, "", '{"header": {}, "entries": [{}]}'])
def test_a_broken_or_missing_table_is_a_reason_that_names_it(monkeypatch, tmp_path, text):
    """Ops without it had been passed over one by one, without a word."""
    if text is not None:
        (tmp_path / "tuned.json").write_text(text)
    monkeypatch.setattr(configs, "__file__", str(tmp_path / "configs.py"))
    monkeypatch.setattr(configs, "shipped", configs.shipped.__wrapped__)
    (reason,) = why_unavailable(H200)
    assert reason.startswith(f"the table of the Triton backend, {tmp_path}/tuned.json, is broken: ")
    assert "\n" not in reason
    assert len(why_unavailable(CPU)) == 2


def test_a_triton_that_cannot_be_imported_is_told_with_the_error(monkeypatch, tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('libtriton.so:\\n  no such file')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "triton")
    (reason,) = why_unavailable(H200)
    assert reason.startswith("Triton cannot be imported (libtriton.so: no such file): pip install")


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


def test_options_are_refused_by_name():
    """It reads none, and had taken any without a word."""
    message = (
        "[options.triton] has num_warps, stages; the Triton backend reads no options: take them out"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        tvr_configured(config={"options": {"triton": {"stages": 2, "num_warps": 4}}})
    for options in ({}, {"triton": {}}, {"pycuda": {"cache_dir": "here"}}):
        tvr_configured(config={"options": options})


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
