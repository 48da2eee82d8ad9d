"""Launchers check and pack what a kernel is given; no GPU is needed for that."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from tvr.backends.pycuda_raw.decode import combine_params, one_pass_params, split_params
from tvr.backends.pycuda_raw.gemv import gemv_params
from tvr.backends.pycuda_raw.kv import kv_write_params
from tvr.backends.pycuda_raw.launch import Kernel, float32, int32, int64, tensor
from tvr.backends.pycuda_raw.linear import linear_params
from tvr.backends.pycuda_raw.prefill_kernel import prefill_params
from tvr.backends.pycuda_raw.rope import rope_kv_write_params
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import DTYPES, LinearSpec
from tvr.errors import KernelError

PARAMS = (
    tensor("x", "bfloat16"),
    int32("rows"),
    int64("x_stride"),
    float32("eps"),
    tensor("lse", "float32", optional=True),
)


class CParams(ctypes.Structure):
    """The same parameters as a C compiler lays them out."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("x_stride", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("lse", ctypes.c_void_p),
    )


class RecordingGpu:
    """Keeps what is launched."""

    name, sm, num_sms, max_shared_bytes = "cpu", 90, 4, 1 << 16

    def __init__(self, error: Exception | None = None) -> None:
        self.launches = []
        self.error = error

    def load(self, variant, params, shared_bytes):
        assert params == "PiqfP"

        def launch(*launched):
            if self.error is not None:
                raise self.error
            self.launches.append(launched)

        return launch


def kernel_on(gpu) -> Kernel:
    variant = KernelVariant(source="some", dtype="bfloat16", head_dim=64)
    return Kernel(gpu, variant, PARAMS, block=128, shared_bytes=4096)


def some_tensor(**options) -> torch.Tensor:
    return torch.zeros(4, 8, **{"dtype": torch.bfloat16, **options})


def test_parameters_lie_as_in_a_c_struct():
    gpu, x, lse = RecordingGpu(), some_tensor(), torch.zeros(4)
    kernel_on(gpu)((7,), x, 4, 1 << 40, 0.5, lse)
    ((grid, block, shared_bytes, packed),) = gpu.launches
    assert (grid, block, shared_bytes) == ((7, 1, 1), (128, 1, 1), 4096)
    # a struct may end in padding, a kernel's parameters do not
    c = CParams.from_buffer_copy(packed.ljust(ctypes.sizeof(CParams), b"\0"))
    assert (c.x, c.rows, c.x_stride, c.eps) == (x.data_ptr(), 4, 1 << 40, 0.5)
    assert c.lse == lse.data_ptr()


def test_an_optional_tensor_may_be_missing():
    gpu = RecordingGpu()
    kernel_on(gpu)((1,), some_tensor(), 4, 8, 0.5, None)
    assert CParams.from_buffer_copy(gpu.launches[0][3]).lse is None


@pytest.mark.parametrize("grid", [(0,), (3, 0), (0, 2, 2)])
def test_a_grid_of_no_blocks_launches_nothing(grid):
    gpu = RecordingGpu()
    kernel_on(gpu)(grid, some_tensor(), 4, 8, 0.5, None)
    assert gpu.launches == []


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (some_tensor(dtype=torch.float16), "x is torch.float16; the kernel was built for torch.bf"),
        (some_tensor(device="meta"), "x is on meta; the kernel is on cpu"),
        (some_tensor().T, "x has stride 8 in its last dimension; that must be contiguous"),
        (None, "x is None; it must be a tensor"),
        (3, "x is 3; it must be a tensor"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(x, message):
    gpu = RecordingGpu()
    wanted = "some_bf16_h64: " + message.replace("torch.bf", "torch.bfloat16")
    with pytest.raises(KernelError, match=f"^{re.escape(wanted)}$"):
        kernel_on(gpu)((1,), x, 4, 8, 0.5, None)
    assert gpu.launches == []


class AnyGpu(RecordingGpu):
    """Takes kernels of any parameters."""

    def load(self, variant, params, shared_bytes):
        return lambda *launched: self.launches.append(launched)


def cache_kernel(gpu) -> Kernel:
    variant = KernelVariant(source="some", dtype="bfloat16", head_dim=64)
    params = (
        tensor("k_cache", "bfloat16", inner=3),
        tensor("out", "bfloat16", inner=2, alignment=16),
    )
    return Kernel(gpu, variant, params, block=128)


def test_blocks_of_a_cache_may_lie_apart_and_one_head_may_have_any_stride():
    gpu, both = AnyGpu(), torch.zeros(5, 2, 4, 16, 8, dtype=torch.bfloat16)
    one_head = torch.zeros(5, 3, 16, 8, dtype=torch.bfloat16)[:, 1:2]
    for k_cache in (both[:, 0], both[:, 1], one_head, both[:0, 1]):
        cache_kernel(gpu)((1,), k_cache, some_tensor())
    assert len(gpu.launches) == 4


@pytest.mark.parametrize(
    ("name", "x", "message"),
    [
        (
            "k_cache",
            torch.zeros(5, 16, 4, 8, dtype=torch.bfloat16).transpose(1, 2),
            "(5, 4, 16, 8) has strides (512, 8, 32, 1); its last 3 dimensions must be contiguous",
        ),
        (
            "out",
            some_tensor()[:, :4],
            "(4, 4) has strides (8, 1); its last 2 dimensions must be contiguous",
        ),
        (
            "out",
            torch.zeros(40, dtype=torch.bfloat16)[4:36].view(4, 8),
            "begins 8 bytes behind a multiple of 16; it is written so many at a time: give a "
            "tensor that begins at one",
        ),
    ],
)
def test_strides_that_the_kernel_is_not_given_and_odd_addresses_are_refused(name, x, message):
    gpu = AnyGpu()
    cache = torch.zeros(5, 4, 16, 8, dtype=torch.bfloat16)
    given = {"k_cache": cache, "out": some_tensor(), name: x}
    with pytest.raises(KernelError, match=f"^{re.escape(f'some_bf16_h64: {name} {message}')}$"):
        cache_kernel(gpu)((1,), given["k_cache"], given["out"])
    assert gpu.launches == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_is_given_caches_and_outputs_that_it_can_use(dtype):
    """A write to a strided output went astray, one to an odd address ended the context."""
    packed = {"k_cache": 3, "v_cache": 3, "out": 3, "lse": 2}
    for of in (split_params, one_pass_params, combine_params, prefill_params):
        params = of(dtype)
        found = {p.name: p.inner for p in params if p.name in packed}
        assert found == {name: packed[name] for name in found}
        assert {"out", "lse"} <= set(found)
        (out,) = (p for p in params if p.name == "out")
        quad = 4 * getattr(torch, dtype).itemsize
        assert out.alignment == (16 if of is prefill_params else quad)
    for params in (kv_write_params(dtype), rope_kv_write_params(dtype)):
        assert [p.inner for p in params if p.name in ("k_cache", "v_cache")] == [3, 3]
    product = LinearSpec(dtype=dtype, in_features=8, out_features=8, max_rows=1)
    for params in (linear_params(product), gemv_params(product)):
        assert [p.inner for p in params if p.name == "out"] == [2]


def test_rows_may_be_strided():
    gpu = RecordingGpu()
    kernel_on(gpu)((1,), some_tensor()[::2, :4], 2, 16, 0.5, None)
    assert len(gpu.launches) == 1


def test_a_refused_launch_names_the_kernel_and_its_grid():
    gpu = RecordingGpu(error=RuntimeError("cuLaunchKernel failed: invalid argument"))
    message = "some_bf16_h64: launch of 7 x 2 x 1 blocks of 128 threads .*: cuLaunchKernel failed"
    with pytest.raises(KernelError, match=message):
        kernel_on(gpu)((7, 2), some_tensor(), 4, 8, 0.5, None)
