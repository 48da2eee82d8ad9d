"""Row kernels of the CUDA backend where the conformance suite does not look, on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.cuda_on_cpu.gpu import CpuGpu
from support.cuda_on_cpu.library import why_not
from support.torch_ops import bind
from tvr.backends.pycuda_raw.plugin import bind as bind_cuda
from tvr.backends.pycuda_raw.threads import shared_evenly
from tvr.conformance.judge import between, within_ulps
from tvr.conformance.oracle import rms_norm as exact_norm
from tvr.conformance.oracle import rope as exact_rope
from tvr.conformance.oracle import silu_mul as exact_silu_mul
from tvr.conformance.tolerance import (
    NORM_ARITHMETIC,
    NORM_FP32_ULPS,
    ROPE_SLACK,
    ROPE_ULPS,
    SILU_FP32_ULPS,
    SILU_ULPS,
)
from tvr.contract import (
    DTYPES,
    AddRmsNormSpec,
    ArgmaxSpec,
    Bounds,
    FusedLinearSpec,
    KvWriteSpec,
    LinearSpec,
    OpSpec,
    RmsNormSpec,
    RopeKvWriteSpec,
    RopeSpec,
    SiluMulSpec,
)
from tvr.errors import KernelError

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

_EPS = 1e-5


@pytest.fixture(scope="module")
def gpu() -> CpuGpu:
    return CpuGpu()


def _random(*shape: int, dtype: str = "float32", seed: int = 0) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(getattr(torch, dtype))


def _run(spec: OpSpec, gpu: CpuGpu):
    bound = bind_cuda(spec, gpu)
    if bound.workspace_bytes is not None:
        bounds = Bounds(max_num_seqs=1, max_num_tokens=1, max_seq_len=1, max_q_len=1)
        bound.attach(torch.zeros(bound.workspace_bytes(bounds), dtype=torch.uint8))
    return bound.run


def _oddly_strided(x: Tensor) -> Tensor:
    """Return x [rows, n] with its rows an odd number of elements apart, from an odd address on."""
    width = x.shape[-1] + 1 + x.shape[-1] % 2
    wide = x.new_full((len(x) * width + 1,), float("nan"))
    return wide[1:].view(len(x), width)[:, : x.shape[-1]].copy_(x)


@pytest.mark.parametrize("items", [1, 32, 33, 320, 512, 513, 1100])
def test_rounds_are_even_and_warps_whole(items):
    threads = shared_evenly(items, 512)
    rounds = -(-items // threads)
    assert threads % 32 == 0
    assert rounds == -(-items // 512)
    assert rounds * threads - items < 32 * rounds


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_has_the_same_bits_wherever_its_rows_stand(gpu, dtype):
    norm = _run(RmsNormSpec(dtype=dtype, hidden_size=2056), gpu)
    x, weight = _random(3, 2056, dtype=dtype), _random(2056, dtype=dtype, seed=1)
    wanted, found = (norm(t, weight, eps=_EPS, out=torch.empty_like(x)) for t in _both(x))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 7, 65, 1027])
def test_rows_of_any_length_are_normed(gpu, dtype, hidden):
    x, residual = (_random(3, hidden, dtype=dtype, seed=seed) for seed in (0, 1))
    weight = _random(hidden, dtype=dtype, seed=2)
    out, total = torch.empty_like(x), torch.empty_like(x)
    add_norm = _run(AddRmsNormSpec(dtype=dtype, hidden_size=hidden), gpu)
    add_norm(x, residual, weight, eps=_EPS, out=out, residual_out=total)
    assert torch.equal(total, x + residual)
    _judge_norm(out, total, weight)


def test_what_a_block_cannot_keep_of_a_row_is_read_again(gpu):
    """The threads of a block keep 8,192 elements in fp32."""
    x, residual = (_random(2, 8192 + 2052, seed=seed) for seed in (0, 1))
    weight = _random(x.shape[-1], seed=2)
    out, total = torch.empty_like(x), residual.clone()
    add_norm = _run(AddRmsNormSpec(dtype="float32", hidden_size=x.shape[-1]), gpu)
    add_norm(x, total, weight, eps=_EPS, out=out, residual_out=total)
    assert torch.equal(total, x + residual)
    _judge_norm(out, total, weight)


def test_rows_without_a_common_stride_are_normed(gpu):
    x, weight = _random(3, 5, 64)[:, :4], _random(64, seed=1)
    norm = _run(RmsNormSpec(dtype="float32", hidden_size=64), gpu)
    wanted = norm(x.contiguous(), weight, eps=_EPS, out=torch.empty(3, 4, 64))
    assert torch.equal(norm(x, weight, eps=_EPS, out=torch.empty(3, 4, 64)), wanted)


def test_a_residual_that_cannot_be_filled_by_rows_is_refused(gpu):
    residual = _random(3, 5, 64)[:, :4]
    add_norm = _run(AddRmsNormSpec(dtype="float32", hidden_size=64), gpu)
    x, weight, out = torch.zeros(3, 4, 64), torch.ones(64), torch.empty(3, 4, 64)
    with pytest.raises(KernelError, match=r"residual_out \(3, 4, 64\) has strides \(320, 64, 1\)"):
        add_norm(x, residual, weight, eps=_EPS, out=out, residual_out=residual)


def test_an_output_that_cannot_be_filled_by_rows_is_refused(gpu):
    """What was written to a copy of it was lost."""
    norm = _run(RmsNormSpec(dtype="float32", hidden_size=64), gpu)
    out = torch.empty(3, 5, 64)[:, :4]
    with pytest.raises(KernelError, match=r"rms_norm: out \(3, 4, 64\) has strides"):
        norm(torch.zeros(3, 4, 64), torch.ones(64), eps=_EPS, out=out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 63, 72, 2500])
def test_activations_of_any_width_and_stride_are_right(gpu, dtype, width):
    silu_mul = _run(SiluMulSpec(dtype=dtype, intermediate_size=width), gpu)
    x = 3 * _random(3, 2 * width, dtype=dtype)
    ulps = SILU_FP32_ULPS if dtype == "float32" else SILU_ULPS
    for rows in _both(x):
        out = silu_mul(rows, out=torch.empty_like(x[:, :width]))
        within_ulps("out", out, exact_silu_mul(x), ulps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [2, 20, 40, 80])
def test_any_even_rotary_dim_turns_in_place_in_odd_strides(gpu, dtype, rotary_dim):
    spec = RopeSpec(dtype=dtype, num_heads=3, num_kv_heads=1, head_dim=80, rotary_dim=rotary_dim)
    q, k = _random(4, 3 * 80, dtype=dtype), _random(4, 80, dtype=dtype, seed=1)
    positions, table = torch.tensor([5, 0, 6, 5]), _random(7, rotary_dim, seed=2)
    for place in (torch.clone, _oddly_strided):
        rows = [place(x).unflatten(1, (-1, 80)) for x in (q, k)]
        _run(spec, gpu)(rows[0], rows[1], positions, table, q_out=rows[0], k_out=rows[1])
        for found, x in zip(rows, (q, k), strict=True):
            wanted, size = exact_rope(x.view(4, -1, 80), positions, table)
            within_ulps("turned", found, wanted, ROPE_ULPS, ROPE_SLACK * size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_and_rows_of_odd_strides_are_written(gpu, dtype):
    spec = KvWriteSpec(dtype=dtype, num_kv_heads=2, head_dim=64, block_size=16)
    k, v = (_random(3, 128, dtype=dtype, seed=seed) for seed in (0, 1))
    slots = torch.tensor([17, -1, 4])
    caches = [_oddly_strided(_random(3, 2048, dtype=dtype, seed=seed)) for seed in (2, 3)]
    k_cache, v_cache = (cache.unflatten(1, (2, 16, 64)) for cache in caches)
    wanted = [cache.clone() for cache in (k_cache, v_cache)]
    bind(spec)(k.view(3, 2, 64), v.view(3, 2, 64), *wanted, slots)
    strided = (_oddly_strided(x).unflatten(1, (2, 64)) for x in (k, v))
    _run(spec, gpu)(*strided, k_cache, v_cache, slots)
    for found, right in zip((k_cache, v_cache), wanted, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [20, 64])
def test_the_fused_write_has_the_bits_of_its_parts(gpu, dtype, rotary_dim):
    heads = {"num_kv_heads": 2, "head_dim": 64}
    turned = {"dtype": dtype, "num_heads": 6, "rotary_dim": rotary_dim, **heads}
    q, k, v = (_random(3, n, 64, dtype=dtype, seed=n) for n in (6, 2, 2))
    positions, table = torch.tensor([1, 0, 3]), _random(4, rotary_dim, seed=2)
    slots, cache = torch.tensor([17, -1, 4]), _random(2, 2, 16, 64, dtype=dtype, seed=3)
    parts = [q.clone(), k.clone(), cache.clone(), cache.clone()]
    _run(RopeSpec(**turned), gpu)(
        parts[0], parts[1], positions, table, q_out=parts[0], k_out=parts[1]
    )
    _run(KvWriteSpec(dtype=dtype, block_size=16, **heads), gpu)(parts[1], v, *parts[2:], slots)
    whole = [q.clone(), k.clone(), cache.clone(), cache.clone()]
    _run(RopeKvWriteSpec(block_size=16, **turned), gpu)(
        *whole[:2], v, positions, table, *whole[2:], slots, q_out=whole[0], k_out=whole[1]
    )
    for found, wanted in zip(whole, parts, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("num_sms", [1, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_shared_by_blocks_gives_the_lowest_id_every_time(dtype, num_sms):
    """In 1, 2 or more parts; counters are left ready, also for another number of rows."""
    vocab, gpu = 40_003, CpuGpu(num_sms=num_sms)
    argmax = _run(ArgmaxSpec(dtype=dtype, vocab_size=vocab), gpu)
    logits = _random(9, vocab, dtype=dtype)
    logits[0, [4_000, 20_000, 39_999]] = 9.0
    logits[1, [16_383, 16_384]] = 9.0
    logits[2, 40_002] = 9.0
    logits[3] = float("-inf")
    logits[4] = float("-inf")
    logits[4, 30_000] = -3.0
    logits[5, 33_333] = float("nan")
    logits[6] = 0.0
    logits[6, :100] = -0.0
    logits[7, [500, 36_000]] = float("inf")
    wanted = torch.tensor([4_000, 16_383, 40_002, 0, 30_000, -1, 0, 500])
    for rows in (9, 1, 4, 9):
        out = argmax(logits[:rows], out=torch.empty(rows, dtype=torch.int64))
        assert out[:8].tolist() == wanted[:rows].tolist()
    padded = _oddly_strided(logits)
    assert argmax(padded, out=torch.empty(9, dtype=torch.int64))[:8].tolist() == wanted.tolist()


def _judge_norm(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Hold a norm of x against the oracle, as the conformance suite does."""
    wanted = exact_norm(x, weight, _EPS, "twice")
    if x.dtype == torch.float32:
        within_ulps("out", out, wanted.double(), NORM_FP32_ULPS)
        return
    lower, upper = (
        exact_norm(x, weight, _EPS, "twice", relative_error=error)
        for error in (-NORM_ARITHMETIC, NORM_ARITHMETIC)
    )
    between("out", out, (lower, upper), wanted)


def _both(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, _oddly_strided(x)


@pytest.mark.parametrize("in_features", [200, 3000, 9000])
@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_of_one_row_has_the_same_bits_wherever_its_tensors_stand(
    gpu, dtype, silu_mul, in_features
):
    spec = FusedLinearSpec(
        dtype=dtype,
        in_features=in_features,
        out_features=6,
        max_rows=1,
        rms_norm=True,
        silu_mul=silu_mul,
    )
    run = _run(spec, gpu)

    def result(x: Tensor, weight: Tensor, norm_weight: Tensor) -> Tensor:
        out = torch.empty(1, spec.out_columns, dtype=x.dtype)
        return run(x, (weight, None), norm_weight=norm_weight, eps=_EPS, out=out)

    tensors = [_random(*shape, dtype=dtype) for shape in ((1, in_features), (6, in_features))]
    tensors.append(_random(1, in_features, dtype=dtype, seed=1)[0])
    x, weight, norm_weight = tensors
    aligned = result(x, weight, norm_weight)
    apart = torch.empty(6, in_features + 1, dtype=x.dtype)[:, :in_features].copy_(weight)
    odd_norm_weight = _oddly_strided(norm_weight[None])[0]
    assert torch.equal(result(_oddly_strided(x), weight, norm_weight), aligned)
    assert torch.equal(result(x, _oddly_strided(weight), norm_weight), aligned)
    assert torch.equal(result(x, apart, norm_weight), aligned)
    assert torch.equal(result(x, weight, odd_norm_weight), aligned)


@pytest.mark.parametrize("in_features", [100, 3000, 9000])
def test_no_nan_comes_from_behind_the_end_of_a_row(gpu, in_features):
    """Squares of 1e-30 are 0 and eps is too, so that the scale is infinite."""
    spec = FusedLinearSpec(
        dtype="bfloat16", in_features=in_features, out_features=4, max_rows=1, rms_norm=True
    )
    x, weight = torch.full((1, in_features), 1e-30), torch.ones(4, in_features)
    packed, out = (weight.bfloat16(), None), torch.empty(1, 4, dtype=torch.bfloat16)
    ones = torch.ones(in_features, dtype=torch.bfloat16)
    _run(spec, gpu)(x.bfloat16(), packed, norm_weight=ones, eps=0.0, out=out)
    assert torch.equal(out, torch.full_like(out, torch.inf))


@pytest.mark.parametrize(
    ("asked", "name"), [("rms_norm", "norm_weight"), ("add", "residual"), ("bias", "bias")]
)
def test_what_a_product_asks_for_may_not_be_left_out(gpu, asked, name):
    spec = FusedLinearSpec(
        dtype="float32", in_features=64, out_features=8, max_rows=1, **{asked: True}
    )
    with pytest.raises(KernelError, match=f"{name} is None; it must be a tensor"):
        _run(spec, gpu)(_random(1, 64), (_random(8, 64), None), out=torch.empty(1, 8))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_bias_may_not_be_left_out_whatever_the_rows(gpu, rows):
    spec = LinearSpec(dtype="float32", in_features=64, out_features=8, max_rows=8, bias=True)
    with pytest.raises(KernelError, match="bias is None; it must be a tensor"):
        _run(spec, gpu)(_random(rows, 64), (_random(8, 64), None), out=torch.empty(rows, 8))


def test_fused_linear_refuses_more_rows_than_one(gpu):
    run = _run(FusedLinearSpec(dtype="float32", in_features=64, out_features=8, max_rows=1), gpu)
    with pytest.raises(KernelError, match="x has 2 rows; this kernel takes at most 1"):
        run(_random(2, 64), (_random(8, 64), None), out=torch.empty(2, 8))


def test_linear_refuses_more_rows_than_a_block_has_room_for(gpu):
    run = _run(LinearSpec(dtype="float32", in_features=64, out_features=8, max_rows=8), gpu)
    weight = _random(8, 64)
    with pytest.raises(KernelError, match="x has 9 rows; this kernel takes at most 8"):
        run(_random(9, 64), (weight, None), out=torch.empty(9, 8))
