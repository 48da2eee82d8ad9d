"""RoPE and KV writes of the reference backend on cases whose answer is known by hand."""

from __future__ import annotations

import pytest
import torch

from support.torch_ops import bind
from tvr.contract import KvWriteSpec, RopeKvWriteSpec, RopeSpec
from tvr.errors import ConfigError, KernelError


def _table(rotary_dim, num_positions=1024, theta=10000.0):
    frequency = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angle = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()


def _rope(q, k, positions, table, rotary_dim=None):
    spec = RopeSpec(
        dtype="float32",
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=q.shape[2],
        rotary_dim=rotary_dim,
    )
    out = torch.full(q.shape, torch.nan), torch.full(k.shape, torch.nan)
    return bind(spec)(q, k, positions, table, q_out=out[0], k_out=out[1])


def _random_qk(tokens, heads, kv_heads, dim):
    g = torch.Generator().manual_seed(0)
    return torch.randn(tokens, heads, dim, generator=g), torch.randn(
        tokens, kv_heads, dim, generator=g
    )


def test_channels_pair_with_those_half_a_head_away():
    """huggingface/transformers#25199: neighbours as pairs give [-1.1426, 1.9221, ...]."""
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    out, _ = _rope(q, q, torch.tensor([1]), _table(4))
    wanted = torch.tensor([-1.984111, 1.959901, 2.462378, 4.019800])
    torch.testing.assert_close(out[0, 0], wanted, rtol=0, atol=1e-6)


def test_each_row_is_turned_by_its_own_position():
    """NVIDIA-NeMo/Automodel#2377"""
    q, k = _random_qk(3, 4, 2, 64)
    positions = torch.tensor([5, 900, 17])
    together = _rope(q, k, positions, _table(64))
    for i in range(3):
        alone = _rope(q[i : i + 1], k[i : i + 1], positions[i : i + 1], _table(64))
        assert all(torch.equal(t[i], a[0]) for t, a in zip(together, alone, strict=True))


@pytest.mark.parametrize("dim", [72, 96])
def test_pair_counts_off_the_powers_of_two_use_the_last_row_of_the_table(dim):
    q, k = _random_qk(2, 2, 1, dim)
    table = _table(dim, num_positions=8)
    out, _ = _rope(q, k, torch.tensor([7, 0]), table)
    a, b = q[0].chunk(2, dim=-1)
    cos, sin = table[7].chunk(2)
    assert torch.equal(out[0], torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1))
    assert torch.equal(out[1], q[1])


def test_slices_of_one_qkv_buffer_are_read_by_their_own_strides():
    """PaddlePaddle/Paddle#74347: q's strides were used for k."""
    qkv = torch.randn(7, 40, 128, generator=torch.Generator().manual_seed(1))
    q, k = qkv[:, :24], qkv[:, 24:32]
    positions = torch.arange(7)
    sliced = _rope(q, k, positions, _table(128))
    copied = _rope(q.contiguous(), k.contiguous(), positions, _table(128))
    assert all(torch.equal(s, c) for s, c in zip(sliced, copied, strict=True))


def test_partial_rotary_turns_the_leading_channels_and_passes_the_rest():
    q, k = _random_qk(3, 2, 1, 128)
    positions = torch.tensor([3, 1, 4])
    out, _ = _rope(q, k, positions, _table(64), rotary_dim=64)
    leading, _ = _rope(q[..., :64].contiguous(), k[..., :64].contiguous(), positions, _table(64))
    assert torch.equal(out[..., :64], leading)
    assert torch.equal(out[..., 64:], q[..., 64:])


def test_int32_positions_are_refused():
    q, k = _random_qk(1, 1, 1, 8)
    with pytest.raises(ConfigError, match=r"positions are torch\.int32; the contract says int64"):
        _rope(q, k, torch.tensor([1], dtype=torch.int32), _table(8))


@pytest.mark.parametrize("position", [-1, 1024])
def test_a_position_outside_the_table_is_an_error(position):
    q, k = _random_qk(1, 1, 1, 8)
    with pytest.raises(KernelError, match="outside the cos_sin_cache of 1024 rows"):
        _rope(q, k, torch.tensor([position]), _table(8))


@pytest.mark.parametrize("slot", [-2, 64])
def test_a_slot_outside_the_cache_is_an_error_and_writes_nothing(slot):
    run = bind(KvWriteSpec(dtype="float32", num_kv_heads=1, head_dim=8, block_size=16))
    k_cache, v_cache = torch.zeros(4, 1, 16, 8), torch.zeros(4, 1, 16, 8)
    new = torch.ones(2, 1, 8)
    with pytest.raises(KernelError, match=f"slots span .*{slot}.*; the cache has 4 blocks of 16"):
        run(new, new, k_cache, v_cache, torch.tensor([3, slot]))
    assert not k_cache.any()
    assert not v_cache.any()


def test_the_composite_has_the_bits_of_its_parts():
    shape = {"dtype": "bfloat16", "num_kv_heads": 2, "head_dim": 64}
    q, k = (x.bfloat16() for x in _random_qk(5, 4, 2, 64))
    v, positions, slots = k.flip(0), torch.arange(5), torch.tensor([3, -1, 40, 0, 63])
    caches = [torch.zeros(4, 2, 16, 64, dtype=torch.bfloat16) for _ in range(4)]
    outs = [torch.empty_like(x) for x in (q, k, q, k)]
    both = bind(RopeKvWriteSpec(num_heads=4, block_size=16, **shape))
    both(q, k, v, positions, _table(64), *caches[:2], slots, q_out=outs[0], k_out=outs[1])
    rope = bind(RopeSpec(num_heads=4, **shape))
    rope(q, k, positions, _table(64), q_out=outs[2], k_out=outs[3])
    bind(KvWriteSpec(block_size=16, **shape))(outs[3], v, *caches[2:], slots)
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
    assert torch.equal(caches[0], caches[2])
    assert torch.equal(caches[1], caches[3])
