"""Prefill attention of the CUDA backend where the conformance suite does not look, on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.cuda_on_cpu.gpu import CpuGpu
from support.cuda_on_cpu.library import why_not
from tvr.backends.pycuda_raw.launch import Gpu, RawKernel
from tvr.backends.pycuda_raw.plugin import HEAD_DIMS
from tvr.backends.pycuda_raw.prefill import bind_attention_prefill
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.backends.torch_ref.attention import bind_prefill
from tvr.conformance.tolerance import frobenius_limit
from tvr.contract import DTYPES, AttentionPrefillSpec, BoundOp, StepMeta

_Q_LENS = (70, 3, 0, 40)
_KV_LENS = (100, 77, 5, 20)  # the last has more new tokens than keys
_BLOCK_SIZE = 16
_NUM_BLOCKS = 20
_SMALLEST_SHARED_MEMORY = 99 * 1024  # of the SMs that are served, that of sm_86, 89 and 120

needs_emulation = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


class NotingGpu:
    """Notes the shared memory that kernels are loaded with."""

    name = "cuda:0"
    sm = 80
    num_sms = 100
    max_shared_bytes = _SMALLEST_SHARED_MEMORY

    def __init__(self) -> None:
        self.shared_bytes: list[int] = []

    def load(self, variant: KernelVariant, params: str, shared_bytes: int) -> RawKernel:
        self.shared_bytes.append(shared_bytes)
        return lambda *args: None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_fit_in_the_shared_memory_of_every_sm(dtype: str, head_dim: int) -> None:
    gpu = NotingGpu()
    bind_attention_prefill(_spec(dtype, head_dim), gpu)
    static = 128  # beside the tiles
    assert gpu.shared_bytes
    assert max(gpu.shared_bytes) + static <= _SMALLEST_SHARED_MEMORY


@needs_emulation
@pytest.mark.parametrize("head_dim", [64, 96])
def test_a_row_has_the_same_bits_in_tall_and_short_tiles(head_dim: int) -> None:
    spec = _spec("bfloat16", head_dim)
    tall, short = (_run(bind_attention_prefill(spec, _gpu(sms)), spec) for sms in (1, 100))
    assert torch.equal(tall, short)


@needs_emulation
@pytest.mark.parametrize(("dtype", "head_dim"), [("bfloat16", 64), ("float16", 80)])
def test_rows_that_cannot_be_copied_by_16_bytes_are_read_right(dtype: str, head_dim: int) -> None:
    spec = _spec(dtype, head_dim)
    _judge(spec, _run(bind_attention_prefill(spec, _gpu(1)), spec, gap=3), gap=3)


@needs_emulation
def test_tensors_that_start_at_an_odd_address_are_read_right() -> None:
    spec = _spec("bfloat16", 64)
    found = _run(bind_attention_prefill(spec, _gpu(1)), spec, gap=8, start=1)
    _judge(spec, found, gap=8, start=1)


@needs_emulation
@pytest.mark.parametrize("scale", [0.0, -0.2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scale_of_0_or_less_is_a_scale(dtype: str, scale: float) -> None:
    """Scores are scaled after their largest is found, which another sign makes the smallest."""
    spec = _spec(dtype, 64)
    _judge(spec, _run(bind_attention_prefill(spec, _gpu(1)), spec, scale=scale), scale=scale)


def _spec(dtype: str, head_dim: int) -> AttentionPrefillSpec:
    return AttentionPrefillSpec(
        dtype=dtype, num_heads=6, num_kv_heads=2, head_dim=head_dim, block_size=_BLOCK_SIZE
    )


def _gpu(num_sms: int) -> Gpu:
    return CpuGpu(num_sms=num_sms)


def _judge(
    spec: AttentionPrefillSpec,
    found: Tensor,
    *,
    gap: int = 0,
    start: int = 0,
    scale: float = 0.1,
) -> None:
    """Hold a result against the reference's: each may be off by as much."""
    wanted = _run(bind_prefill(spec), spec, gap=gap, start=start, scale=scale).double()
    error = (found.double() - wanted).norm() / wanted.norm()
    assert error <= 2 * frobenius_limit(spec.dtype, max(_KV_LENS))


def _run(
    bound: BoundOp,
    spec: AttentionPrefillSpec,
    *,
    gap: int = 0,
    start: int = 0,
    scale: float = 0.1,
) -> Tensor:
    """Return the output of random sequences; `gap` elements lie between rows, and blocks.

    Before the first there are `start`.
    """
    g = torch.Generator().manual_seed(0)
    dtype = getattr(torch, spec.dtype)

    def normal(*shape: int) -> Tensor:
        row = torch.Size(shape[1:]).numel()
        flat = torch.randn(start + shape[0] * (row + gap), generator=g).to(dtype)
        return flat[start:].view(shape[0], row + gap)[:, :row].unflatten(1, shape[1:])

    num_tokens, num_seqs = sum(_Q_LENS), len(_Q_LENS)
    ids = iter(torch.randperm(_NUM_BLOCKS, generator=g).tolist())
    block_table = torch.full((num_seqs, 8), -1, dtype=torch.int32)
    for row, kv_len in zip(block_table, _KV_LENS, strict=True):
        for column in range(-(-kv_len // _BLOCK_SIZE)):
            row[column] = next(ids)
    q_lens = torch.tensor([0, *_Q_LENS])
    step = StepMeta(
        block_table=block_table,
        seq_lens=torch.tensor(_KV_LENS, dtype=torch.int32),
        cu_seqlens_q=q_lens.cumsum(0).to(torch.int32),
        num_seqs=num_seqs,
        num_tokens=num_tokens,
        max_q_len=max(_Q_LENS),
        max_seq_len=max(_KV_LENS),
        seq_lens_cpu=_KV_LENS,
    )
    q = normal(num_tokens, spec.num_heads, spec.head_dim)
    k_cache, v_cache = (
        normal(_NUM_BLOCKS, spec.num_kv_heads, _BLOCK_SIZE, spec.head_dim) for _ in range(2)
    )
    new = torch.empty(num_tokens, spec.num_kv_heads, spec.head_dim, dtype=dtype)
    out = torch.full((num_tokens, spec.num_heads, spec.head_dim), torch.nan, dtype=dtype)
    result: Tensor = bound.run(q, new, new, k_cache, v_cache, step, scale=scale, out=out)
    return result
