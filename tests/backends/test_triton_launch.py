"""How the Triton backend's kernels reach a device; no GPU is needed to see that."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from weakref import WeakSet

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tvr[triton]'")

from triton.runtime.interpreter import interpreter_builder
from triton.tools.tensor_descriptor import TensorDescriptor

from tvr.backends.triton.decode_kernels import split_kernel
from tvr.backends.triton.fused_linear import bind_fused_linear
from tvr.backends.triton.interpreter import Interpreter
from tvr.backends.triton.launch import Config, CudaGpu, Kernel
from tvr.backends.triton.linear import bind_linear
from tvr.backends.triton.prefill import bind_attention_prefill
from tvr.backends.triton.prefill_kernels import prefill_kernel
from tvr.contract import AttentionPrefillSpec, FusedLinearSpec, LinearSpec, StepMeta
from tvr.errors import KernelError


class RecordingGpu:
    """Keeps what is launched, or refuses it."""

    device, sm, num_sms = torch.device("cpu"), 90, 4

    def __init__(self, *, pdl: bool = False, error: Exception | None = None) -> None:
        self.pdl = pdl
        self.error = error
        self.launches = []

    def launch(self, kernel, grid, args, constants, options):
        if self.error is not None:
            raise self.error
        self.launches.append((grid, args, constants, options))


class L1Gpu(RecordingGpu):
    """Says what it compiled, and keeps whose memory is left to L1."""

    def __init__(self):
        super().__init__()
        self.left = []

    def launch(self, *launched):
        super().launch(*launched)
        return "compiled"

    def leave_to_l1(self, compiled):
        self.left.append(compiled)


def scale_kernel():
    """Stands for a jitted function, of which a launcher needs only the name."""


CONFIG = Config(num_warps=8, num_stages=2, blocks={"BLOCK_N": 64})


def test_constants_and_options_are_those_of_the_configuration():
    gpu, x = RecordingGpu(), torch.zeros(4)
    Kernel(gpu, scale_kernel, CONFIG, HEAD_DIM=128)((2, 3), x, 4, 0.5, None)
    ((grid, args, constants, options),) = gpu.launches
    assert (grid, args) == ((2, 3), (x, 4, 0.5, None))
    assert constants == {"BLOCK_N": 64, "HEAD_DIM": 128, "PDL": False}
    assert options == {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}


def test_only_gpus_with_dependent_launch_are_asked_for_it():
    gpu = RecordingGpu(pdl=True)
    Kernel(gpu, scale_kernel, CONFIG)((1,))
    ((_, _, constants, options),) = gpu.launches
    assert constants["PDL"] is options["launch_pdl"] is True


def test_a_grid_without_programs_is_not_launched():
    gpu = RecordingGpu(error=ValueError("grid is 0"))
    Kernel(gpu, scale_kernel, CONFIG)((0, 7), torch.zeros(0))


def test_a_tensor_on_another_device_is_named_with_the_kernel():
    gpu = RecordingGpu()
    message = "scale_kernel: a tensor is on meta; the op is bound on cpu"
    with pytest.raises(KernelError, match=f"^{message}$"):
        Kernel(gpu, scale_kernel, CONFIG)((1,), torch.zeros(1), torch.zeros(1, device="meta"))
    assert gpu.launches == []


def test_what_a_descriptor_describes_must_be_on_the_device_too():
    described = TensorDescriptor(torch.zeros(64, 64, device="meta"), [64, 64], [64, 1], [32, 32])
    with pytest.raises(KernelError, match="scale_kernel: a tensor is on meta"):
        Kernel(RecordingGpu(), scale_kernel, CONFIG)((1,), described)


@pytest.mark.parametrize("kernel", [split_kernel, prefill_kernel])
def test_no_width_of_the_block_table_compiles_attention_again(kernel):
    """It is as wide as the longest sequence of a step needs: 1 for a short prompt."""
    kept_general = {p.name for p in kernel.params if p.do_not_specialize}
    assert {"table_stride", "num_seqs"} <= kept_general


def test_prefill_describes_keys_only_if_their_rows_differ():
    """The copy engine is told of strides, and takes none of 0."""
    gpu = RecordingGpu()
    spec = AttentionPrefillSpec(
        dtype="bfloat16", num_heads=2, num_kv_heads=1, head_dim=128, block_size=16
    )
    run = bind_attention_prefill(spec, gpu).run
    one = torch.ones(1, dtype=torch.int32)
    step = StepMeta(
        block_table=one[None],
        seq_lens=one * 4,
        cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32),
        num_seqs=1,
        num_tokens=4,
        max_q_len=4,
        max_seq_len=4,
        seq_lens_cpu=[4],
    )
    q, cache = torch.zeros(4, 2, 128).bfloat16(), torch.zeros(2, 1, 16, 128).bfloat16()
    k = torch.zeros(1, 1, 128).bfloat16()
    for keys, kind in ((k.repeat(4, 1, 1), TensorDescriptor), (k.expand(4, 1, 128), type(None))):
        run(q, keys, keys, cache, cache, step, scale=1.0, out=torch.empty_like(q))
        assert isinstance(gpu.launches[-1][1][1], kind)


def test_a_launch_that_fails_names_kernel_and_grid_in_one_line():
    refusal = RuntimeError("out of resource: shared memory,\n  Required: 300000")
    gpu = RecordingGpu(error=refusal)
    with pytest.raises(KernelError) as caught:
        Kernel(gpu, scale_kernel, CONFIG)((2, 3), torch.zeros(1))
    assert str(caught.value) == (
        "scale_kernel: launch of 2 x 3 programs failed: "
        "RuntimeError: out of resource: shared memory, Required: 300000"
    )
    assert caught.value.__cause__ is refusal


def test_the_interpreter_looks_for_overflow_only_where_it_would_tell(monkeypatch):
    """To look for it, and drop what was found, takes a third of its time."""
    debugging = replace(interpreter_builder.options, debug=True, sanitize_overflow=True)
    monkeypatch.setattr(interpreter_builder, "options", debugging)
    Interpreter()
    assert interpreter_builder.options is debugging
    interpreter_builder.options = replace(debugging, debug=False)
    Interpreter()
    assert not interpreter_builder.options.sanitize_overflow


def test_only_kernels_that_ask_leave_the_memory_to_l1():
    gpu, x = L1Gpu(), torch.zeros(4)
    Kernel(gpu, scale_kernel, CONFIG)((1,), x)
    assert gpu.left == []
    Kernel(gpu, scale_kernel, CONFIG).with_l1()((1,), x)
    assert gpu.left == ["compiled"]


class FakeDriver:
    def __init__(self, error=0):
        self.error = error
        self.asked = []

    def cuFuncSetAttribute(self, function, attribute, value):
        self.asked.append((function.value, attribute, value))
        return self.error


def h200():
    """A `CudaGpu` with an H200's sizes, of which there need be none."""
    gpu = object.__new__(CudaGpu)
    gpu.device, gpu._index = torch.device("cuda", 0), 0
    gpu._most_threads, gpu._shared_bytes, gpu._left_to_l1 = 2048, 233472, WeakSet()
    return gpu


def use_driver(monkeypatch, driver):
    monkeypatch.setattr("tvr.backends.triton.launch._driver", lambda: driver)
    monkeypatch.setattr("torch.cuda.device", lambda index: nullcontext())


class Compiled:
    """What Triton knows of a compiled kernel."""

    function = 7

    def __init__(self, n_regs, num_warps, shared):
        self.n_regs = n_regs
        self.metadata = SimpleNamespace(name="linear", num_warps=num_warps, shared=shared)


@pytest.mark.parametrize(
    ("n_regs", "num_warps", "shared", "percent"),
    [
        (73, 8, 128, 1),  # 3 blocks of 256 threads with 80 registers: 3,456 bytes
        (32, 8, 128, 4),  # 8 of them: 9,216
        (16, 4, 0, 7),  # 16, as there are threads for no more: 16,384
        (40, 4, 65536, 86),  # 3, as there is shared memory for no more: 199,680
        (255, 16, 2048, 1),  # one, though it does not fit at all: 3,072
    ],
)
def test_blocks_that_fit_keep_their_shared_memory(monkeypatch, n_regs, num_warps, shared, percent):
    driver = FakeDriver()
    use_driver(monkeypatch, driver)
    gpu, kernel = h200(), Compiled(n_regs, num_warps, shared)
    gpu.leave_to_l1(kernel)
    gpu.leave_to_l1(kernel)
    assert driver.asked == [(7, 9, percent)]


def test_a_refused_wish_is_a_warning_once(monkeypatch, caplog):
    use_driver(monkeypatch, FakeDriver(error=1))
    gpu, kernel = h200(), Compiled(73, 8, 128)
    gpu.leave_to_l1(kernel)
    gpu.leave_to_l1(kernel)
    (message,) = caplog.messages
    assert message.startswith("linear: the driver of cuda:0 refuses to split")
    assert "at 1%: CUDA error 1" in message


@pytest.mark.parametrize(
    ("bind", "spec", "rows"),
    [
        (bind_linear, LinearSpec, 1),
        (bind_linear, LinearSpec, 8),
        (bind_fused_linear, FusedLinearSpec, 1),
    ],
)
def test_products_leave_the_memory_to_l1(bind, spec, rows):
    gpu = L1Gpu()
    x, weight, out = (torch.zeros(shape) for shape in ((rows, 64), (32, 64), (rows, 32)))
    bound = bind(spec(dtype="float32", in_features=64, out_features=32, max_rows=rows), gpu)
    bound.run(x, (weight, None), out=out)
    assert gpu.left == ["compiled"]
