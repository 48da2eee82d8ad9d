"""Norm, activation, linear and argmax of the reference backend."""

from __future__ import annotations

import pytest
import torch

from support.torch_ops import CPU, bind
from tvr.backends.torch_ref import plugin
from tvr.contract import (
    DTYPES,
    OPS,
    AddRmsNormSpec,
    ArgmaxSpec,
    DeviceFacts,
    LinearSpec,
    RmsNormSpec,
    SiluMulSpec,
)


def _norm(x, weight=None, eps=1e-5, **fields):
    dtype = str(x.dtype).removeprefix("torch.")
    run = bind(RmsNormSpec(dtype=dtype, hidden_size=x.shape[-1], **fields))
    weight = torch.ones(x.shape[-1], dtype=x.dtype) if weight is None else weight
    return run(x, weight, eps=eps, out=torch.empty(x.shape, dtype=x.dtype))


def _random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("eps", "wanted"), [(1e-5, 0.031607), (1e-6, 0.0995037)])
def test_eps_is_added_inside_the_root(eps, wanted):
    """amd/IRON#139: outside the root the first gives 0.909."""
    out = _norm(torch.full((1, 64), 1e-4), eps=eps)
    torch.testing.assert_close(out, torch.full_like(out, wanted), rtol=1e-5, atol=0)
    assert not _norm(torch.zeros(1, 64), eps=eps).any()


@pytest.mark.parametrize("value", [300.0, 60000.0])
def test_fp16_squares_do_not_overflow(value):
    """meta-llama/llama#1048"""
    assert (_norm(torch.full((1, 4096), value, dtype=torch.float16)) == 1.0).all()


def test_misaligned_inputs_have_the_bits_of_their_copies():
    buffer, weight = _random(5 * 4096 + 1), _random(4097, seed=1)
    x = buffer[1:].view(5, 4096)
    assert torch.equal(_norm(x, weight[1:]), _norm(x.clone(), weight[1:].clone()))


def test_a_transposed_input_is_normed_along_its_rows():
    """ModelTC/LightLLM#1467: the row stride was used in one of two passes."""
    x = _random(128, 64).t()
    torch.testing.assert_close(_norm(x), _norm(x.contiguous()))


@pytest.mark.parametrize("hidden", [64, 128, 256, 2048, 3072, 3584, 5120, 8192, 16384])
def test_every_hidden_size_is_normed_with_the_residual(hidden):
    x, residual, weight = _random(2, hidden), _random(2, hidden, seed=1), _random(hidden, seed=2)
    run = bind(AddRmsNormSpec(dtype="float32", hidden_size=hidden))
    out, total = run(
        x, residual, weight, eps=1e-5, out=torch.empty_like(x), residual_out=torch.empty_like(x)
    )
    assert torch.equal(total, x + residual)
    wanted = torch.nn.functional.rms_norm(total.double(), (hidden,), weight.double(), 1e-5)
    torch.testing.assert_close(out, wanted.float())


@pytest.mark.parametrize("hidden", [1, 2, 3, 63, 64, 65, 100])
def test_batch_invariant_norm_sums_every_element_once(hidden):
    x = _random(3, hidden)
    torch.testing.assert_close(_norm(x, batch_invariant=True), _norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(576, 960), (7, 5), (64, 64), (1000, 17), (33, 130), (5000, 9)])
@pytest.mark.parametrize("bias", [False, True])
def test_batch_invariant_linear_gives_a_row_the_same_bits_in_every_batch(dtype, sizes, bias):
    n_in, n_out = sizes
    spec = LinearSpec(
        dtype=dtype, in_features=n_in, out_features=n_out, bias=bias, batch_invariant=True
    )
    bound = plugin.tvr_bind_linear(spec=spec, device=CPU)
    dtype = getattr(torch, dtype)
    x, weight = _random(37, n_in).to(dtype), _random(n_out, n_in, seed=1).to(dtype)
    packed = bound.pack(weight, _random(n_out, seed=2).to(dtype) if bias else None)

    def run(rows):
        return bound.run(rows, packed, out=torch.empty(len(rows), n_out, dtype=dtype))

    whole = run(x)
    for rows in (slice(0, 1), slice(5, 6), slice(36, 37), slice(3, 20), slice(1, 37)):
        assert torch.equal(run(x[rows]), whole[rows])


def test_a_linear_binds_the_loaded_weight_itself():
    spec = LinearSpec(dtype="float32", in_features=64, out_features=32)
    assert plugin.tvr_bind_linear(spec=spec, device=CPU).pack is None
    invariant = LinearSpec(dtype="float32", in_features=64, out_features=32, batch_invariant=True)
    weight = _random(32, 64)
    packed = plugin.tvr_bind_linear(spec=invariant, device=CPU).pack(weight, None)
    assert packed[0].data_ptr() == weight.data_ptr()


@pytest.fixture
def three_threads():
    """Torch cuts a large batch at the threads' borders, within rows if need be."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("rows", "width"), [(43, 5), (43, 100), (64, 1100), (97, 1537)])
def test_batch_invariant_activation_gives_a_row_the_same_bits_in_every_batch(
    three_threads, rows, width
):
    run = bind(SiluMulSpec(dtype="float32", intermediate_size=width, batch_invariant=True))
    x = 3 * _random(rows, 2 * width, seed=rows)
    whole = run(x, out=torch.empty(rows, width))
    for i in range(rows):
        assert torch.equal(run(x[i : i + 1], out=torch.empty(1, width))[0], whole[i])


def test_the_activation_rounds_once():
    x = 3 * _random(64, 128).bfloat16()
    run = bind(SiluMulSpec(dtype="bfloat16", intermediate_size=64))
    out = run(x, out=torch.empty(64, 64, dtype=torch.bfloat16))
    gate, up = x.double().chunk(2, dim=-1)
    once = (gate * torch.sigmoid(gate) * up).bfloat16()
    twice = torch.nn.functional.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1]
    assert (out == once).float().mean() > 0.99
    assert not torch.equal(once, twice)


def test_argmax_takes_the_lowest_of_equals_and_marks_nan_rows():
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor([[1, 3, 3], [-inf, -inf, -inf], [inf, nan, 0], [nan, 0, 1], [0, 0, inf]])
    run = bind(ArgmaxSpec(dtype="float32", vocab_size=3))
    assert run(logits, out=torch.empty(5, dtype=torch.int64)).tolist() == [1, 0, -1, -1, 2]


def test_the_probe_names_what_is_missing():
    assert plugin.tvr_probe(device=CPU) == []
    assert plugin.tvr_probe(device=DeviceFacts(type="xpu")) == [
        "device type 'xpu' is not among cpu, cuda"
    ]
    if not torch.cuda.is_available():
        cuda = DeviceFacts(type="cuda", index=0, sm=90)
        assert plugin.tvr_probe(device=cuda) == ["torch sees no CUDA device"]


def test_the_reference_declares_every_op():
    info = plugin.tvr_backend_info()
    assert info.name == "torch"
    assert set(info.ops) == set(OPS)
