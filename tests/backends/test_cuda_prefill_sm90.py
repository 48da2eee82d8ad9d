"""When Hopper's prefill kernel is taken, and what it is launched with; it needs a Hopper to run."""

from __future__ import annotations

import pytest
import torch

from tvr.backends.pycuda_raw.launch import Dim3, RawKernel
from tvr.backends.pycuda_raw.prefill import bind_attention_prefill
from tvr.backends.pycuda_raw.prefill_sm90 import fits, sm90_kernel
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.contract import AttentionPrefillSpec, StepMeta

_SHARED_MEMORY = 227 * 1024  # of a block on sm_90
_STATIC = 256  # barriers and work item, beside the tiles


class NotingGpu:
    """Notes which kernels are loaded with how much shared memory, and which are launched."""

    name = "cpu"
    num_sms = 132
    max_shared_bytes = _SHARED_MEMORY

    def __init__(self, sm: int) -> None:
        self.sm = sm
        self.shared_bytes: dict[str, int] = {}
        self.launched: list[tuple[str, Dim3, Dim3]] = []

    def load(self, variant: KernelVariant, params: str, shared_bytes: int) -> RawKernel:
        self.shared_bytes[variant.symbol] = shared_bytes

        def launch(grid: Dim3, block: Dim3, shared_bytes: int, packed: bytes) -> None:
            self.launched.append((variant.source, grid, block))

        return launch


@pytest.mark.parametrize(
    ("sm", "dtype", "head_dim"),
    [(80, "bfloat16", 64), (120, "bfloat16", 64), (90, "float32", 64), (90, "bfloat16", 80)],
)
def test_it_serves_no_other_sm_dtype_or_head_dim(sm: int, dtype: str, head_dim: int) -> None:
    assert sm90_kernel(_spec(dtype, head_dim), NotingGpu(sm)) is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_its_tiles_fit_in_shared_memory(dtype: str, head_dim: int) -> None:
    gpu = NotingGpu(90)
    assert sm90_kernel(_spec(dtype, head_dim), gpu) is not None
    (shared_bytes,) = gpu.shared_bytes.values()
    assert shared_bytes + _STATIC <= _SHARED_MEMORY


@pytest.mark.parametrize(("head_dim", "tile_rows"), [(64, 192), (128, 128), (256, 128)])
def test_there_are_blocks_for_every_row_of_every_sequence(head_dim: int, tile_rows: int) -> None:
    gpu = NotingGpu(90)
    _run(gpu, head_dim)
    ((source, (num_blocks, _, _), (num_threads, _, _)),) = gpu.launched
    assert source == "prefill_sm90"
    assert num_threads == 2 * tile_rows + 128  # 128 for 64 rows, and 128 that copy
    tiles = sum(-(-q_len * 3 // tile_rows) for q_len in (1, 600, 0, 65))
    assert num_blocks >= 2 * tiles


@pytest.mark.parametrize("odd", ["q", "k_cache", "v_cache"])
def test_rows_that_cannot_be_copied_by_16_bytes_go_to_the_kernel_of_every_sm(odd: str) -> None:
    gpu = NotingGpu(90)
    _run(gpu, 64, odd=odd)
    ((source, _, _),) = gpu.launched
    assert source == "prefill"


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_of_0_or_less_does_not_fit(scale: float) -> None:
    q, cache = torch.zeros(4, 6, 64), torch.zeros(2, 2, 16, 64)
    assert fits(q, cache, cache, 0.5)
    assert not fits(q, cache, cache, scale)


def test_tensors_that_start_at_an_odd_address_do_not_fit() -> None:
    q, cache = torch.zeros(4, 6, 64), torch.zeros(2, 2, 16, 64)
    odd_q, odd_cache = (torch.zeros(x.numel() + 1)[1:].view_as(x) for x in (q, cache))
    assert not fits(odd_q, cache, cache, 0.5)
    assert not fits(q, odd_cache, cache, 0.5)
    assert not fits(q, cache, odd_cache, 0.5)


def _spec(dtype: str, head_dim: int) -> AttentionPrefillSpec:
    return AttentionPrefillSpec(
        dtype=dtype, num_heads=6, num_kv_heads=2, head_dim=head_dim, block_size=16
    )


def _run(gpu: NotingGpu, head_dim: int, odd: str = "") -> None:
    """Run a step of four sequences; the tensor called `odd` has rows at odd addresses."""
    q_lens = (1, 600, 0, 65)
    num_tokens = sum(q_lens)
    shapes = {"q": (num_tokens, 6, head_dim), "k_cache": (2, 2, 16, head_dim)}
    shapes["v_cache"] = shapes["k_cache"]
    tensors = {name: _strided(shape, gap=int(name == odd)) for name, shape in shapes.items()}
    step = StepMeta(
        block_table=torch.zeros(4, 40, dtype=torch.int32),
        seq_lens=torch.tensor(q_lens, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1, 601, 601, 666], dtype=torch.int32),
        num_seqs=len(q_lens),
        num_tokens=num_tokens,
        max_q_len=max(q_lens),
        max_seq_len=max(q_lens),
        seq_lens_cpu=q_lens,
    )
    new = torch.empty(0)
    bound = bind_attention_prefill(_spec("bfloat16", head_dim), gpu)
    out = torch.empty(shapes["q"], dtype=torch.bfloat16)
    bound.run(
        tensors["q"], new, new, tensors["k_cache"], tensors["v_cache"], step, scale=0.125, out=out
    )


def _strided(shape: tuple[int, ...], gap: int) -> torch.Tensor:
    """Return a tensor of that shape with `gap` numbers between the items of its first dim."""
    size = torch.Size(shape[1:]).numel()
    return torch.zeros(shape[0], size + gap, dtype=torch.bfloat16)[:, :size].unflatten(1, shape[1:])
