"""Attention of the reference backend on cases whose answer is known by hand."""

from __future__ import annotations

import pytest
import torch

from support.torch_ops import bind, step_of
from tvr.contract import AttentionDecodeSpec, AttentionPrefillSpec
from tvr.errors import KernelError


def _decode(num_heads=1, num_kv_heads=1, head_dim=8, dtype="float32", **fields):
    return bind(
        AttentionDecodeSpec(
            dtype=dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=16,
            **fields,
        )
    )


def _prefill(num_heads=1, num_kv_heads=1, head_dim=8, dtype="float32", **fields):
    return bind(
        AttentionPrefillSpec(
            dtype=dtype,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=16,
            **fields,
        )
    )


def _ramp_cache(num_tokens, head_dim=8):
    """One KV head in blocks 0, 1, ...: all keys 0, value of token i is i in every channel."""
    num_blocks = -(-num_tokens // 16)
    k_cache = torch.zeros(num_blocks, 1, 16, head_dim)
    ramp = torch.arange(num_blocks * 16.0).view(num_blocks, 1, 16, 1)
    return k_cache, ramp.expand(num_blocks, 1, 16, head_dim).contiguous()


def _run_prefill(run, q_lens, kv_lens, k_cache, v_cache, table, head_dim=8, num_heads=1):
    q = torch.zeros(sum(q_lens), num_heads, head_dim)
    new = torch.zeros(sum(q_lens), k_cache.shape[1], head_dim)
    out = torch.full_like(q, torch.nan)
    step = step_of(kv_lens, table, q_lens)
    return run(q, new, new, k_cache, v_cache, step, scale=1.0, out=out)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_block_ids_past_65535_are_not_cut_to_sixteen_bits(dtype):
    """ROCm/ATOM#702"""
    run = _decode(head_dim=64, dtype=dtype)
    cache = torch.empty(65600, 1, 16, 64, dtype=getattr(torch, dtype))
    cache[0] = 1.0
    cache[65536] = 2.0
    q = torch.ones(1, 1, 64, dtype=cache.dtype)
    out = run(
        q, cache, cache, step_of([16], torch.tensor([[65536]])), scale=0.1, out=torch.empty_like(q)
    )
    assert (out == 2.0).all()


@pytest.mark.parametrize("num_keys", [65537, 131072])
def test_a_very_long_context_is_averaged_exactly(num_keys):
    """vllm-project/vllm#1154: the logits of the whole context did not fit shared memory."""
    k_cache, v_cache = (torch.zeros(8192, 1, 16, 8) for _ in range(2))
    v_cache[4096:] = 1.0
    table = torch.arange(8192).unsqueeze(0)
    q = torch.ones(1, 1, 8)
    out = _decode()(
        q, k_cache, v_cache, step_of([num_keys], table), scale=1.0, out=torch.empty_like(q)
    )
    wanted = (num_keys - 65536) / num_keys
    torch.testing.assert_close(out, torch.full_like(out, wanted))


def test_the_causal_mask_is_aligned_bottom_right():
    """Dao-AILab/flash-attention#282: top-left alignment gives the means of 1 and of 2 keys."""
    k_cache, v_cache = _ramp_cache(16)
    out = _run_prefill(_prefill(), [2], [5], k_cache, v_cache + 1, torch.tensor([[0]]))
    assert out[:, 0, 0].tolist() == [2.5, 3.0]


def test_rows_before_the_first_key_are_zero():
    """Dao-AILab/flash-attention#1778: more rows than keys."""
    k_cache, v_cache = _ramp_cache(16)
    out = _run_prefill(_prefill(), [5], [2], k_cache, v_cache + 1, torch.tensor([[0]]))
    assert out[:, 0, 0].tolist() == [0, 0, 0, 1.0, 1.5]


def test_the_window_counts_the_query_itself_in_prefill_and_decode():
    """mistralai/mistral-inference#60"""
    k_cache, v_cache = _ramp_cache(16)
    table = torch.tensor([[0]])
    q = torch.zeros(1, 1, 8)
    decoded = _decode(window=4)(
        q, k_cache, v_cache, step_of([10], table), scale=1.0, out=torch.empty_like(q)
    )
    prefilled = _run_prefill(_prefill(window=4), [10], [10], k_cache, v_cache, table)
    assert decoded[0, 0, 0] == 7.5
    assert prefilled[9, 0, 0] == 7.5
    assert prefilled[:4, 0, 0].tolist() == [0, 0.5, 1.0, 1.5]


def test_softcap_bounds_the_scores():
    run = _decode(softcap=2.0, return_lse=True)
    q = torch.full((1, 1, 8), 10.0)
    k_cache = torch.ones(1, 1, 16, 8)
    lse = torch.empty(1, 1)
    run(
        q,
        k_cache,
        k_cache,
        step_of([1], torch.tensor([[0]])),
        scale=1.0,
        out=torch.empty_like(q),
        lse=lse,
    )
    assert lse.item() == 2.0  # one key: lse is its score, 2 * tanh(80 / 2)


def test_without_the_causal_mask_every_row_sees_every_key():
    k_cache, v_cache = _ramp_cache(16)
    out = _run_prefill(_prefill(causal=False), [3], [5], k_cache, v_cache, torch.tensor([[0]]))
    assert out[:, 0, 0].tolist() == [2.0, 2.0, 2.0]


def test_fp16_scores_do_not_overflow():
    """huggingface/transformers#33317: 64 * 300 * 300 is far past 65504."""
    k_cache = torch.zeros(1, 1, 16, 64, dtype=torch.float16)
    k_cache[0, 0, 0], k_cache[0, 0, 1] = 300.0, 299.0
    v_cache = torch.randn(1, 1, 16, 64, generator=torch.Generator().manual_seed(0)).half()
    q = torch.full((1, 1, 64), 300.0, dtype=torch.float16)
    out = _decode(head_dim=64, dtype="float16")(
        q, k_cache, v_cache, step_of([2], torch.tensor([[0]])), scale=1.0, out=torch.empty_like(q)
    )
    assert torch.equal(out[0, 0], v_cache[0, 0, 0])


def test_a_context_of_one_token_returns_its_value():
    k_cache, v_cache = (
        torch.randn(1, 4, 16, 128, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    q = torch.randn(1, 32, 128, generator=torch.Generator().manual_seed(2))
    out = _decode(32, 4, 128)(
        q, k_cache, v_cache, step_of([1], torch.tensor([[0]])), scale=0.1, out=torch.empty_like(q)
    )
    assert torch.equal(out[0], v_cache[0, :, 0].repeat_interleave(8, dim=0))


def test_a_batch_may_hold_sequences_without_new_tokens():
    """Dao-AILab/flash-attention#1537"""
    k_cache, v_cache = _ramp_cache(32, head_dim=64)
    k_cache, v_cache = (c.expand(-1, 3, -1, -1) for c in (k_cache, v_cache))
    table = torch.tensor([[0], [0], [1], [1]])
    out = _run_prefill(
        _prefill(9, 3, 64), [0, 1, 0, 1], [0, 3, 0, 5], k_cache, v_cache, table, 64, num_heads=9
    )
    assert out.shape == (2, 9, 64)
    assert (out[0] == 1.0).all()
    assert (out[1] == 18.0).all()


def test_prefix_hit_and_miss_in_one_batch_equal_their_runs_alone():
    """vllm-project/vllm#7018: the row without a prefix got a table of zeros."""
    g = torch.Generator().manual_seed(3)
    k_cache, v_cache = (torch.randn(8, 2, 16, 8, generator=g) for _ in range(2))
    q = torch.randn(48, 4, 8, generator=g)
    new = torch.zeros(48, 2, 8)
    table = torch.tensor([[1, 2, 3], [4, 5, 6]])
    run = _prefill(4, 2, batch_invariant=True)

    def attend(rows, sequences, q_lens):
        step = step_of([40] * len(sequences), table[sequences], q_lens)
        out = torch.empty_like(q[rows])
        return run(q[rows], new[rows], new[rows], k_cache, v_cache, step, scale=0.3, out=out)

    both = attend(slice(0, 48), [0, 1], [8, 40])
    assert torch.equal(both[:8], attend(slice(0, 8), [0], [8]))
    assert torch.equal(both[8:], attend(slice(8, 48), [1], [40]))


@pytest.mark.parametrize("bad", [-1, 4, 2**31 - 1])
def test_a_block_outside_the_pool_is_an_error_and_not_block_zero(bad):
    k_cache, v_cache = _ramp_cache(64)
    q = torch.zeros(1, 1, 8)
    step = step_of([17], torch.tensor([[0, bad]]))
    with pytest.raises(KernelError, match="outside the pool of 4 within the first 17 tokens"):
        _decode()(q, k_cache, v_cache, step, scale=1.0, out=torch.empty_like(q))


def test_a_long_prefill_is_tiled_and_gives_the_same(monkeypatch):
    g = torch.Generator().manual_seed(4)
    k_cache, v_cache = (torch.randn(4, 2, 16, 8, generator=g) for _ in range(2))
    q = torch.randn(50, 4, 8, generator=g)
    new = torch.zeros(50, 2, 8)
    step = step_of([60], torch.arange(4).unsqueeze(0), [50])
    outs = []
    for max_scores in (1 << 24, 7 * 4 * 60):  # one tile; tiles of seven rows
        monkeypatch.setattr("tvr.backends.torch_ref.attention._MAX_SCORES", max_scores)
        run = _prefill(4, 2)
        outs.append(run(q, new, new, k_cache, v_cache, step, scale=0.3, out=torch.empty_like(q)))
    torch.testing.assert_close(outs[0], outs[1])


@pytest.mark.parametrize("head_dim", [5, 64])
def test_batch_invariant_prefill_has_the_bits_of_decode_at_every_position(head_dim):
    g = torch.Generator().manual_seed(5)
    k_cache, v_cache = (torch.randn(4, 2, 16, head_dim, generator=g) for _ in range(2))
    q = torch.randn(50, 6, head_dim, generator=g)
    new = torch.zeros(50, 2, head_dim)
    table = torch.tensor([[2, 0, 3, 1]])
    prefill = _prefill(6, 2, head_dim, batch_invariant=True)
    decode = _decode(6, 2, head_dim, batch_invariant=True)
    step = step_of([50], table, [50])
    whole = prefill(q, new, new, k_cache, v_cache, step, scale=0.2, out=torch.empty_like(q))
    for i in range(50):
        row = q[i : i + 1]
        step = step_of([i + 1], table)
        one = decode(row, k_cache, v_cache, step, scale=0.2, out=torch.empty_like(row))
        assert torch.equal(one[0], whole[i]), f"position {i}"
