"""PyCUDA's context and stream beside torch's, on a GPU: every case is a process of its own.

PyCUDA aborts a process that ends with a context pushed, so the exit code is what is tested.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: `add(gpu)` launches a kernel of ours on `gpu` and checks what it wrote.
PRELUDE = """
import torch
from tvr.backends.pycuda_raw.device import open_gpu
from tvr.backends.pycuda_raw.activation import bind_silu_mul
from tvr.contract import SiluMulSpec

SPEC = SiluMulSpec(dtype="float32", intermediate_size=8)

def run(gpu):
    bound = bind_silu_mul(SPEC, gpu)
    with torch.cuda.stream(gpu.stream):
        x = torch.ones(4, 16, device=gpu.name)
        out = torch.zeros(4, 8, device=gpu.name)
        bound.run(x, out=out)
    gpu.stream.synchronize()
    torch.testing.assert_close(out, torch.full_like(out, 0.7310586))
"""


def succeed(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{done.returncode}: {done.stderr}"


@pytest.mark.parametrize(
    "first",
    [
        "",
        "import torch",
        "import torch; torch.zeros(1, device='cuda')",
        "import pycuda.driver",
        "import pycuda.driver; pycuda.driver.init(); import torch",
        "import triton, torch",
        "import torch; torch.cuda.set_device(torch.cuda.device_count() - 1)",
        "import tvr; from tvr import LLM",
    ],
)
def test_every_order_of_imports_ends_with_exit_code_0(first):
    succeed(f"{first}\n{PRELUDE}\nrun(open_gpu(0))")


def test_threads_start_launch_and_end():
    succeed(
        PRELUDE
        + """
import threading
errors = []

def work():
    try:
        run(open_gpu(0))
    except BaseException as error:
        errors.append(error)

for _ in range(3):
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
assert not errors, errors
run(open_gpu(0))
"""
    )


def test_a_device_opened_by_a_thread_that_ended_serves_others():
    succeed(
        PRELUDE
        + """
import threading
thread = threading.Thread(target=lambda: run(open_gpu(0)))
thread.start(); thread.join()
run(open_gpu(0))
"""
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_take_turns_in_one_thread():
    succeed(PRELUDE + "for index in (0, 1, 0, 1, 1, 0): run(open_gpu(index))")


def test_an_exception_after_a_launch_ends_the_process_as_always():
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + "run(open_gpu(0)); raise SystemExit(3)"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (3, "")


def test_a_captured_launch_is_replayed_on_new_values():
    succeed(
        PRELUDE
        + """
gpu = open_gpu(0)
bound = bind_silu_mul(SPEC, gpu)
with torch.cuda.stream(gpu.stream):
    x = torch.zeros(4, 16, device=gpu.name)
    out = torch.full((4, 8), -1.0, device=gpu.name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=gpu.stream):
        bound.run(x, out=out)
    gpu.stream.synchronize()
    assert (out == -1).all()
    x.fill_(1)
    graph.replay()
gpu.stream.synchronize()
torch.testing.assert_close(out, torch.full_like(out, 0.7310586))
"""
    )


def test_a_launch_that_the_driver_refuses_is_an_error_at_the_call():
    succeed(
        PRELUDE
        + """
from tvr.errors import KernelError
from tvr.backends.pycuda_raw.launch import Kernel
from tvr.backends.pycuda_raw.activation import silu_mul_params
from tvr.backends.pycuda_raw.variants import KernelVariant

variant = KernelVariant(source="silu_mul", dtype="float32")
params = silu_mul_params("float32")
kernel = Kernel(open_gpu(0), variant, params, block=2048)
args = [torch.ones(4, 16, device="cuda:0") if p.code == "P" else 1 for p in params]
try:
    kernel((1,), *args)
except KernelError as error:
    assert str(error).startswith("silu_mul_fp32: launch of 1 x 1 x 1 blocks of 2048 threads")
else:
    raise AssertionError("2048 threads were launched")
"""
    )
