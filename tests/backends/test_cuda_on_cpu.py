"""The emulation that CUDA kernels are tested with: it computes as a GPU does, and sees mistakes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.cuda_on_cpu import library
from support.cuda_on_cpu.gpu import CpuGpu
from tvr.backends.pycuda_raw.launch import Kernel, int32, int64, tensor
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.errors import KernelError

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=str(library.why_not()))

PROBES = Path(library.__file__).parent / "probes"
FAULTS = re.findall(r"^  ([A-Z_]+),$", (PROBES / "faults.cu").read_text(), re.MULTILINE)

#: What an error says of each fault, with the thread if it is always the same.
SAID = {
    "DIVERGED": "lanes of a warp diverge: .*__(any|shfl)_sync .*__(any|shfl)_sync",
    "DIVERGED_MASKS": "lanes of a warp diverge: .*mask ffff[01f]+.*mask ffff[01f]+",
    "NOT_IN_MASK": "mask 00000001 leaves out the calling lane",
    "ABSENT_LANE": "reads lane 16, which is not among the lanes 0000ffff",
    "HALF_A_WARP": "ldmatrix needs all 32 lanes; of this warp only lanes ffff0000",
    "DEADLOCK": (
        "deadlock: lanes 0000ffff of warp 0 wait in __syncthreads; lanes ffff0000 of warp 0 wait "
        "in __syncwarp"
    ),
    "MISALIGNED_COPY": "cp_async_16: misaligned address",
    "MISALIGNED_MATRIX": "ldmatrix: misaligned address",
    "MISALIGNED_ONCE": "load_16_once: misaligned address",
    "MISALIGNED_ONCE_IN_ORDER": "load_16_once_in_order: misaligned address",
    "MATRIX_ELSEWHERE": "ldmatrix: .* is not in shared memory",
    "PAST_SHARED": "byte .* of (its )?256 of dynamic shared memory",
    "NULL_POINTER": "signal 11 at address|in none of the tensors",
}
#: What is only seen where every access is checked.
SAID_IF_CHECKED = {
    "NO_BARRIER": r"race: reads byte \d+|reads byte \d+ of shared memory, which nothing wrote",
    "WRITE_AFTER_READ": r"race: (reads|writes) byte \d+ .*which thread \d+ (read|wrote)",
    "NO_SYNCWARP": r"race: \w+ byte \d+ of shared memory, which thread \d+ (read|wrote)",
    "MISALIGNED_LOAD": r"faults.cu:\d+: a misaligned address",
    "PAST_ARRAY": r"faults.cu:\d+: an index outside of its array",
    "OVERFLOW": r"faults.cu:\d+: a product that overflows",
    "PAST_TENSOR": r"thread \(63, 0, 0\): reads 4 bytes at .*, in none of the tensors",
    "UNWRITTEN": r"reads byte \d+ of shared memory, which nothing wrote",
}
#: What is seen in the result.
GIVES_NAN = ("NO_WAIT", "WAIT_TOO_FEW", "NO_BARRIER", "UNWRITTEN")


@pytest.fixture(scope="module")
def gpu() -> CpuGpu:
    return CpuGpu(kernels=PROBES)


@pytest.fixture(scope="module")
def checking_gpu() -> CpuGpu:
    return CpuGpu(kernels=PROBES, checked=True)


def run_fault(gpu: CpuGpu, fault: str) -> tuple[Tensor, Tensor]:
    """Return what the kernel was given, and what it made of it."""
    params = (tensor("in", "float32"), tensor("out", "float32"), int32("fault"))
    variant = KernelVariant(source="faults", dtype="float32")
    kernel = Kernel(gpu, variant, params, block=64, shared_bytes=256)
    given, made = torch.arange(64.0), torch.zeros(64)
    kernel((1,), given, made, FAULTS.index(fault))
    return given, made


@pytest.mark.parametrize("checked", [False, True])
def test_a_kernel_without_faults_runs(checked, gpu, checking_gpu):
    given, made = run_fault(checking_gpu if checked else gpu, "NONE")
    assert torch.equal(made, given)


@pytest.mark.parametrize("fault", SAID)
def test_a_fault_is_reported(gpu, fault):
    with pytest.raises(KernelError, match=rf"faults_fp32: .*block \(0, 0, 0\).*{SAID[fault]}"):
        run_fault(gpu, fault)
    given, made = run_fault(gpu, "NONE")
    assert torch.equal(made, given), "the next launch does not run"


@pytest.mark.parametrize("fault", SAID_IF_CHECKED)
def test_a_fault_is_reported_where_accesses_are_checked(checking_gpu, fault):
    with pytest.raises(KernelError, match=SAID_IF_CHECKED[fault]):
        run_fault(checking_gpu, fault)


@pytest.mark.parametrize("fault", SAID)
def test_checking_accesses_hides_no_other_fault(checking_gpu, fault):
    with pytest.raises(KernelError, match=SAID[fault]):
        run_fault(checking_gpu, fault)


@pytest.mark.parametrize("fault", GIVES_NAN)
def test_memory_that_was_not_written_is_nan(gpu, fault):
    _, made = run_fault(gpu, fault)
    assert made.isnan().any()


def test_every_fault_is_tested():
    assert set(FAULTS) == {"NONE", *SAID, *SAID_IF_CHECKED, *GIVES_NAN}


def test_lanes_exchange_what_cuda_says(checking_gpu):
    params = (tensor("in", "float32"), tensor("out", "float32"))
    variant = KernelVariant(source="warp", dtype="float32")
    x, out = torch.randn(32, generator=torch.Generator().manual_seed(0)), torch.zeros(11, 32)
    Kernel(checking_gpu, variant, params, block=32)((1,), x, out)
    lane = torch.arange(32)
    in_half = lane % 16 + 5 < 16
    counts = torch.tensor([sum(31 - i for i in range(n)) for n in range(32)])
    wanted = [
        x[(lane * 7 + 3) % 32],
        x[lane // 8 * 8 + 5],
        x[lane ^ 21],
        torch.where(lane >= 3, x[(lane - 3) % 32], x),
        torch.where(in_half, x[(lane + 5) % 32], x),
        (x > 0).sum().expand(32),
        torch.ones(32),
        torch.zeros(32),
        torch.where(lane % 2 == 1, x[lane ^ 2], x[lane ^ 4]),
        counts,
        torch.where(lane < 8, torch.where(lane < 7, x[(lane + 1) % 32], x), torch.zeros(32)),
    ]
    for found, known in zip(out, wanted, strict=True):
        assert torch.equal(found, known.float())


def run_matrix(gpu: CpuGpu, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a @ b + 1 of tiles [n, 16, 16] and [n, 16, 8], and what the lanes held."""
    dtype = str(a.dtype).removeprefix("torch.")
    params = (*(tensor(n, dtype) for n in "ab"), tensor("c", "float32"), tensor("held", "int32"))
    kernel = Kernel(gpu, KernelVariant(source="matrix", dtype=dtype), params, block=32)
    c, held = torch.zeros(len(a), 16, 8), torch.zeros(len(a), 3, 32, 4, dtype=torch.int32)
    kernel((len(a),), a, b, c, held)
    return c, held


@pytest.fixture(scope="module")
def matrix_gpu(tmp_path_factory: pytest.TempPathFactory) -> CpuGpu:
    """A gpu for matrix.cu, which includes the kernels' common.cuh."""
    folder = tmp_path_factory.mktemp("kernels")
    for path in (PROBES / "matrix.cu", library.KERNELS / "common.cuh"):
        (folder / path.name).write_text(path.read_text())
    return CpuGpu(kernels=folder, checked=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mma_multiplies_matrices(matrix_gpu, dtype):
    draw = torch.Generator().manual_seed(1)
    # Whole numbers, small enough that every product and sum is exact.
    a = torch.randint(-9, 10, (3, 16, 16), generator=draw)
    b = torch.randint(-9, 10, (3, 16, 8), generator=draw)
    c, _ = run_matrix(matrix_gpu, a.to(dtype), b.to(dtype))
    assert torch.equal(c, (a @ b + 1).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mma_reads_every_number_as_it_is(matrix_gpu, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    some = every[::2] if dtype == torch.bfloat16 else every
    rows = some.view(-1, 16).repeat_interleave(16, 0)  # number i of a row alone in the i-th of 16
    a = torch.where(torch.eye(16, dtype=torch.bool).repeat(len(rows) // 16, 1), rows, 0)
    a = a.view(-1, 16, 16)
    ones = torch.ones(len(a), 16, 8, dtype=dtype)
    c, _ = run_matrix(matrix_gpu, a, ones)
    assert torch.equal(c[:, :, 3].flatten().nan_to_num(7.0), (some.float() + 1).nan_to_num(7.0))


def test_lanes_hold_matrices_as_ptx_says(matrix_gpu):
    a = torch.arange(256, dtype=torch.int16).view(1, 16, 16)
    _, held = run_matrix(matrix_gpu, a.view(torch.float16), torch.zeros(1, 16, 8).half())
    pairs = held.view(torch.int16).view(3, 32, 4, 2)
    parts = [a[0, row : row + 8, column : column + 8] for column in (0, 8) for row in (0, 8)]
    for lane in range(32):
        g, t = lane // 4, lane % 4 * 2
        for j, part in enumerate(parts):
            assert pairs[0, lane, j].tolist() == part[g, t : t + 2].tolist()
            assert pairs[1, lane, j].tolist() == part[t : t + 2, g].tolist()
            assert pairs[2, lane, j].tolist() == part[t : t + 2, g].tolist()


def run_order(gpu: CpuGpu, grid: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return the turn and the sum of each block."""
    params = tuple(tensor(name, "int32") for name in ("counter", "turns", "sums"))
    kernel = Kernel(gpu, KernelVariant(source="order", dtype="float32"), params, block=96)
    x, y, z = grid
    counter, turns, sums = (torch.zeros(n, dtype=torch.int32) for n in (1, x * y * z, x * y * z))
    kernel(grid, counter, turns, sums)
    return turns, sums


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1), (5, 3, 4)])
@pytest.mark.parametrize("seed", [0, 1, 2, 77])
def test_every_block_runs_once_in_the_order_of_the_seed(grid, seed):
    turns, sums = run_order(CpuGpu(kernels=PROBES, seed=seed, checked=True), grid)
    natural = list(range(len(turns)))
    assert sorted(turns.tolist()) == natural
    if seed == 0 or len(turns) > 2:
        assert (turns.tolist() == natural) == (seed == 0 or len(turns) == 1)
    assert set(sums.tolist()) == {sum(range(80))}


def test_a_debugger_sees_the_same():
    gpu = CpuGpu(kernels=PROBES, debug=True, checked=True)
    _, sums = run_order(gpu, (5, 1, 1))
    assert set(sums.tolist()) == {sum(range(80))}
    for fault in ("DEADLOCK", "PAST_TENSOR", "NULL_POINTER"):
        with pytest.raises(KernelError, match=(SAID | SAID_IF_CHECKED)[fault]):
            run_fault(gpu, fault)


def test_parameters_of_other_types_are_refused(gpu):
    params = (tensor("in", "float32"), tensor("out", "float32"), int64("fault"))
    with pytest.raises(KernelError, match="takes parameters of types PPi; its Python side has PPq"):
        Kernel(gpu, KernelVariant(source="faults", dtype="float32"), params, block=64)


def test_more_shared_memory_than_a_block_may_have_is_refused(gpu):
    variant = KernelVariant(source="faults", dtype="float32")
    with pytest.raises(KernelError, match=r"166913 bytes of shared memory; .* at most 166912"):
        gpu.load(variant, "PPi", 166913)


def test_a_source_that_does_not_compile_says_where(tmp_path):
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken_fp32() { oops; }\n')
    with pytest.raises(KernelError, match=r"broken\.cu:1:.*oops"):
        CpuGpu(kernels=tmp_path, folder=tmp_path / "built").load(
            KernelVariant(source="broken", dtype="float32"), "", 0
        )


def test_a_library_is_compiled_again_only_when_something_changed(tmp_path):
    source = '#include "more.cuh"\nextern "C" __global__ void kernel_fp32() {}\n'
    (tmp_path / "kernel.cu").write_text(source)
    (tmp_path / "more.cuh").write_text("// one\n")
    variant = KernelVariant(source="kernel", dtype="float32")
    built = tmp_path / "built"

    def libraries() -> set[str]:
        CpuGpu(kernels=tmp_path, folder=built).load(variant, "", 0)
        return {path.parent.name for path in built.glob("*/kernel.so")}

    first = libraries()
    assert libraries() == first
    (tmp_path / "more.cuh").write_text("// two\n")
    assert len(libraries() - first) == 1
    variant = replace(variant, defines=(("SIZE", 3),))
    assert len(libraries()) == 3


def test_every_function_of_ptx_is_emulated():
    defined = re.compile(r"^(?:__device__ __forceinline__|inline) \w+ (\w+)", re.MULTILINE)
    files = (library.KERNELS / "ptx.cuh", library.RUNTIME / "ptx.cuh")
    wanted, found = (set(defined.findall(path.read_text())) for path in files)
    assert wanted
    assert wanted == found
