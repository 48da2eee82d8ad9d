"""Decode attention of the CUDA backend where the conformance suite does not look, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from support.cuda_on_cpu.gpu import CpuGpu
from support.cuda_on_cpu.library import why_not
from tvr.backends.pycuda_raw.decode import bind_attention_decode
from tvr.backends.pycuda_raw.decode_shape import decode_shape
from tvr.backends.pycuda_raw.decode_workspace import Layout, split_rule
from tvr.backends.pycuda_raw.plugin import HEAD_DIMS
from tvr.backends.torch_ref.attention import bind_decode
from tvr.conformance.tolerance import frobenius_limit
from tvr.contract import DTYPES, AttentionDecodeSpec, BoundOp, Bounds, StepMeta

_BLOCK_SIZE = 16
_KIB = 1024
_SHARED_MEMORY = {"sm_80": 163 * _KIB, "sm_90": 227 * _KIB, "sm_120": 99 * _KIB}

needs_emulation = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.mark.parametrize("arch", _SHARED_MEMORY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_as_many_blocks_fit_on_an_sm_as_the_grid_counts_on(
    arch: str, dtype: str, head_dim: int
) -> None:
    most = _SHARED_MEMORY[arch]
    for group_size in (1, 3, 8, 9, 16, 71):
        shape = decode_shape(_spec(dtype, head_dim, heads=group_size, kv_heads=1), most)
        static, reserved = 128, _KIB  # of a block; an SM has the reserve of one block more
        assert shape.ctas * (shape.shared_bytes + static + reserved) <= most + reserved


def test_fixed_splits_need_no_more_workspace_than_they_can_fill() -> None:
    spec = _spec("bfloat16", 64, batch_invariant=True)
    shape = decode_shape(spec, _SHARED_MEMORY["sm_90"])
    rule = split_rule(spec, shape)
    short, long, longest = (
        Layout(spec, shape, 264, _bounds(8, max_seq_len)).num_bytes
        for max_seq_len in (512, 131072, 10**6)
    )
    assert rule.splits_within(512 // shape.tile_tokens) == 1
    assert short < long == longest


@needs_emulation
def test_a_workspace_is_laid_out_for_its_own_size() -> None:
    spec, lens = _spec("bfloat16", 64), [70, 3]
    bound = bind_attention_decode(spec, _gpu())
    assert bound.workspace_bytes is not None
    assert bound.attach is not None
    num_bytes = bound.workspace_bytes(_bounds(len(lens), max(lens)))
    bound.workspace_bytes(_bounds(200, 10_000))
    bound.attach(_garbage(num_bytes))
    assert torch.equal(_run(bound, spec, lens), _run(_attached(spec, lens, _gpu()), spec, lens))


@needs_emulation
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_may_be_shared_by_more_blocks_than_are_merged_at_once(dtype: str) -> None:
    spec = _spec(dtype, 64)
    _judge(spec, [4500], _gpu(num_sms=100))


@needs_emulation
def test_a_few_long_sequences_among_many_padding_rows() -> None:
    spec = _spec("bfloat16", 64)
    _judge(spec, [0] * 50 + [900] + [0] * 30 + [70], _gpu(num_sms=3))


@needs_emulation
def test_more_sequences_than_the_plan_has_threads() -> None:
    spec = _spec("bfloat16", 64, heads=1, kv_heads=1)
    _judge(spec, [37 * s % 75 for s in range(1030)], _gpu(num_sms=10))


@needs_emulation
@pytest.mark.parametrize("max_splits", [1, 2, 7])
def test_long_sequences_in_few_splits(max_splits: int) -> None:
    spec = _spec("float16", 128, max_splits=max_splits)
    _judge(spec, [1500, 0, 1, 65], _gpu(num_sms=5))


@needs_emulation
def test_a_long_batch_invariant_sequence_keeps_its_bits() -> None:
    spec = _spec("bfloat16", 64, batch_invariant=True)
    lens = [1, 2000, 0, 700]
    batch, alone = (_run(_attached(spec, n, _gpu(num_sms=5)), spec, n) for n in (lens, lens[:2]))
    assert torch.equal(batch[:2], alone)


@needs_emulation
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rows_that_cannot_be_copied_by_16_bytes_are_read_right(dtype: str, head_dim: int) -> None:
    spec = _spec(dtype, head_dim)
    _judge(spec, [100, 0, 17], _gpu(num_sms=2), gap=3)


@needs_emulation
def test_tensors_that_start_at_an_odd_address_are_read_right() -> None:
    checks_alignment = CpuGpu(num_sms=2, checked=True)
    _judge(_spec("bfloat16", 64), [100, 0, 17], checks_alignment, gap=8, start=1)


@needs_emulation
@pytest.mark.parametrize("max_shared_bytes", _SHARED_MEMORY.values())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_one_two_and_four_warps(dtype: str, max_shared_bytes: int) -> None:
    spec = _spec(dtype, 256, heads=20)
    _judge(spec, [130, 0, 33], _gpu(num_sms=2, max_shared_bytes=max_shared_bytes))


@needs_emulation
@pytest.mark.parametrize("scale", [0.0, -0.2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_scale_of_0_or_less_is_a_scale(dtype: str, scale: float) -> None:
    _judge(_spec(dtype, 64), [100, 0, 17], _gpu(num_sms=2), scale=scale)


def _spec(
    dtype: str, head_dim: int, heads: int = 6, kv_heads: int = 2, **fields: Any
) -> AttentionDecodeSpec:
    return AttentionDecodeSpec(
        dtype=dtype,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=_BLOCK_SIZE,
        **fields,
    )


def _gpu(**facts: int) -> CpuGpu:
    return CpuGpu(**facts)


def _bounds(num_seqs: int, max_seq_len: int) -> Bounds:
    return Bounds(
        max_num_seqs=num_seqs, max_num_tokens=num_seqs, max_seq_len=max_seq_len, max_q_len=1
    )


def _attached(spec: AttentionDecodeSpec, kv_lens: Sequence[int], gpu: CpuGpu) -> BoundOp:
    """Return the op with a workspace for just these lengths, full of garbage."""
    bound = bind_attention_decode(spec, gpu)
    if bound.workspace_bytes is not None and bound.attach is not None:
        num_bytes = bound.workspace_bytes(_bounds(len(kv_lens), max(kv_lens)))
        bound.attach(_garbage(num_bytes))
    return bound


def _garbage(num_bytes: int) -> Tensor:
    """Return a workspace that nothing was written to."""
    memory = torch.full((num_bytes + 256,), 0x7F, dtype=torch.uint8)
    start = -memory.data_ptr() % 256
    return memory[start : start + num_bytes]


def _judge(
    spec: AttentionDecodeSpec,
    kv_lens: Sequence[int],
    gpu: CpuGpu,
    *,
    gap: int = 0,
    start: int = 0,
    scale: float = 0.1,
) -> None:
    """Hold a result against the reference's, sequence by sequence: each may be off by as much."""
    found, wanted = (
        _run(bound, spec, kv_lens, gap=gap, start=start, scale=scale).double()
        for bound in (_attached(spec, kv_lens, gpu), bind_decode(spec))
    )
    for kv_len, row, known in zip(kv_lens, found, wanted, strict=True):
        assert (row - known).norm() <= 2 * frobenius_limit(spec.dtype, kv_len) * known.norm()


def _run(
    bound: BoundOp,
    spec: AttentionDecodeSpec,
    kv_lens: Sequence[int],
    *,
    gap: int = 0,
    start: int = 0,
    scale: float = 0.1,
) -> Tensor:
    """Return the output of random sequences; `gap` elements lie between rows, and blocks.

    Before the first there are `start`. A sequence is the same whichever come behind it.
    """
    dtype = getattr(torch, spec.dtype)
    counts = [-(-kv_len // _BLOCK_SIZE) for kv_len in kv_lens]
    num_blocks, num_seqs = sum(counts) + 1, len(kv_lens)

    def normal(seed: int, *shape: int) -> Tensor:
        width = torch.Size(shape[1:]).numel() + gap
        flat = torch.randn(start + shape[0] * width, generator=torch.Generator().manual_seed(seed))
        wide = flat.to(dtype)[start:].view(shape[0], width)
        return wide[:, : width - gap].unflatten(1, shape[1:])

    block_table = torch.full((num_seqs, max(counts) + 1), 2**31 - 1, dtype=torch.int32)
    first = 1
    for row, count in zip(block_table, counts, strict=True):
        row[:count] = torch.arange(first, first + count).flip(0)
        first += count
    step = StepMeta(
        block_table=block_table,
        seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32),
        num_seqs=num_seqs,
        num_tokens=num_seqs,
        max_q_len=1,
        max_seq_len=max(kv_lens),
        seq_lens_cpu=kv_lens,
    )
    q = normal(0, num_seqs, spec.num_heads, spec.head_dim)
    k_cache, v_cache = (
        normal(seed, num_blocks, spec.num_kv_heads, _BLOCK_SIZE, spec.head_dim) for seed in (1, 2)
    )
    if bound.plan is not None:
        bound.plan(step)
    for _ in range(2):  # a second layer needs counters that start anew
        out = torch.full((num_seqs, spec.num_heads, spec.head_dim), torch.nan, dtype=dtype)
        bound.run(q, k_cache, v_cache, step, scale=scale, out=out)
    return out
