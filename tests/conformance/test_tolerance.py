"""The limits are between what rounding does and what the faults they are for do."""

from __future__ import annotations

import math

import pytest
import torch

from support.fault import Fault, faulty
from tvr.backends.torch_ref import plugin
from tvr.conformance import check_backend, format_results, oracle, tolerance
from tvr.conformance.case import Case
from tvr.conformance.judge import between, small_frobenius, within
from tvr.conformance.ledger import CheckFailed
from tvr.conformance.sequences import random_sequences
from tvr.contract import DTYPES, AttentionDecodeSpec

#: A product of eight terms of which some rows cancel nearly all.
CANCELLING = "dtype=float32 in_features=8 out_features=1 num_tokens=143 seed=0"
ONE_COLUMN = "dtype={dtype} in_features=576 out_features=1 num_tokens=70 seed=3"
#: A mean whose equal weights, of one over a thousand and some, all round to the same side.
LONG_MEAN = (
    "dtype=float32 num_heads=2 num_kv_heads=1 head_dim=64 block_size=16 q_lens={q_lens} "
    "kv_lens=1025,4097,1000"
)
HALF = ["float16", "bfloat16"]
KV_LEN = 8192


def long_decode(dtype, seed):
    """The inputs of a decode of one sequence: spec, scale, q, k, v."""
    # Nine heads: of two, the token may happen to weigh next to nothing in both.
    spec = AttentionDecodeSpec(dtype=dtype, num_heads=9, num_kv_heads=3, head_dim=64, block_size=16)
    drawn = random_sequences(
        Case(name=f"{dtype}-{seed}", spec=spec, q_lens=(1,), kv_lens=(KV_LEN,))
    )
    return spec, drawn.scale, drawn.q[0], drawn.k[0], drawn.v[0]


def passes(judge, *arguments) -> bool:
    try:
        judge("out", *arguments)
    except CheckFailed:
        return False
    return True


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_dropped_token_of_8192_shows_in_the_frobenius_error(dtype, seed):
    spec, scale, q, k, v = long_decode(dtype, seed)
    wanted = oracle.attention(spec, scale, q, k, v)
    limit = tolerance.attention_limit(dtype, KV_LEN, wanted.largest_score)
    plain = oracle.low_precision_attention(spec, scale, q, k, v)
    assert passes(small_frobenius, plain, wanted.out, limit)
    dropped = oracle.attention(spec, scale, q, k[:-1], v[:-1]).out.to(q.dtype)
    assert not passes(small_frobenius, dropped, wanted.out, limit)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_wrong_element_of_many_shows_in_the_largest_error_only(dtype):
    generator = torch.Generator().manual_seed(5)
    wanted = torch.randn(64, 4096, generator=generator, dtype=torch.float64)
    found, largest, eps = wanted.clone(), wanted.abs().max().item(), tolerance.EPS[dtype]
    found[7, 7] += 4 * eps * largest
    low_precision_error = 0.5 * eps * largest
    assert passes(small_frobenius, found, wanted, tolerance.frobenius_limit(dtype, 64))
    limit = tolerance.max_error_limit(dtype, low_precision_error, largest)
    assert not passes(within, found, wanted, limit, "")


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_more_or_less_of_a_hundred_shows_in_a_needle(dtype):
    assert tolerance.needle_limit(dtype, 100) < 1 / 100


def test_one_dropped_token_of_8192_equal_ones_shows_in_the_lse():
    assert tolerance.lse_limit(4.0) < math.log(KV_LEN / (KV_LEN - 1))


@pytest.mark.parametrize("dtype", HALF)
def test_large_scores_excuse_nothing_in_half_precision(dtype):
    for score in (1.0, 500.0):
        usual = tolerance.frobenius_limit(dtype, 100)
        assert tolerance.attention_limit(dtype, 100, score) == usual
        assert tolerance.max_error_limit(dtype, 0.0, 1.0, score) == tolerance.max_error_limit(
            dtype, 0.0, 1.0
        )


def test_large_scores_excuse_in_fp32_what_fp32_scores_cost_and_not_much_more():
    """A score of 300 is stored to 2^-16 of 1, and exp hands that on as a relative error."""
    stored = 300.0 * 2.0**-24
    assert stored < tolerance.attention_limit("float32", 100, 300.0) < 16 * stored


@pytest.mark.parametrize("rounding", ["twice", "once"])
@pytest.mark.parametrize("dtype", HALF)
def test_rounding_leaves_room_in_fewer_than_one_element_of_200_of_a_norm(dtype, rounding):
    ends, wanted = norm_case(dtype, rounding)
    assert (ends[0] != ends[1]).double().mean() < 1 / 200
    assert passes(between, wanted, ends, wanted)
    fixed = ends[0] == ends[1]
    up = torch.nextafter(wanted, torch.full_like(wanted, torch.inf))
    for place in fixed.nonzero()[::9973].tolist():
        nudged = wanted.clone()
        nudged[tuple(place)] = up[tuple(place)]
        assert not passes(between, nudged, ends, wanted)


@pytest.mark.parametrize("dtype", HALF)
def test_two_ulps_behind_the_weight_can_be_one_before_it(dtype):
    """Why no limit in ulps is both right and sharp."""
    ends, wanted = norm_case(dtype, "twice")
    apart = (ends[0].double() - ends[1].double()).abs() / tolerance.ulp(wanted.double(), dtype)
    assert apart.max() == 2


def norm_case(dtype, rounding):
    """Both ends of what a norm of random rows may be, and what it is."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(200, 2048, generator=generator).to(getattr(torch, dtype))
    weight = (1 + torch.randn(2048, generator=generator) / 4).to(x.dtype)
    error = tolerance.NORM_ARITHMETIC
    low, wanted, high = (
        oracle.rms_norm(x, weight, 1e-5, rounding, relative_error=e) for e in (-error, 0.0, error)
    )
    return (low, high), wanted


def drops_the_last_term(right, spec, a):
    weight, bias = a["packed"]
    return right(x=a["x"][:, :-1], packed=(weight[:, :-1], bias))


def outcomes(backend, op, checks, case):
    results = check_backend(backend, ops=[op], checks=checks, cases=[case])
    assert {r.check for r in results} == set(checks)
    return results


@pytest.mark.parametrize("case", [CANCELLING, *(ONE_COLUMN.format(dtype=d) for d in DTYPES)])
def test_products_that_cancel_may_be_off_by_what_fp32_loses_and_by_no_term(case):
    checks = ["product_matches_oracle", "strided_rows_are_multiplied_right"]
    results = outcomes(plugin, "linear", checks, case)
    assert not any(r.failed for r in results), format_results(results)
    backend = faulty(Fault(checks[0], "linear", drops_the_last_term))
    results = outcomes(backend, "linear", checks, case)
    assert all(r.failed for r in results), format_results(results)


def plain_attention(keys_left_out):
    """`softmax(scores) @ v` of whole sequences, without the first keys."""

    def attends_plainly(right, spec, a):
        step, size, start = a["step"], spec.block_size, 0
        for s, kv_len in enumerate(step.seq_lens_cpu):
            token = torch.arange(keys_left_out, kv_len)
            at = step.block_table[s, token // size].long(), slice(None), token % size
            k, v = (
                a[name][at].repeat_interleave(spec.group_size, 1).transpose(0, 1)
                for name in ("k_cache", "v_cache")
            )  # [H, keys, D]
            q_len = int(step.cu_seqlens_q[s + 1] - step.cu_seqlens_q[s])
            rows = slice(start, start + q_len)
            start += q_len
            hidden = token > kv_len - q_len + torch.arange(q_len).view(-1, 1)
            scores = a["q"][rows].transpose(0, 1) @ k.transpose(1, 2) * a["scale"]
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            a["out"][rows] = (weights @ v).transpose(0, 1)
        return a["out"]

    return attends_plainly


@pytest.mark.parametrize(
    ("op", "q_lens"), [("attention_decode", "1,1,1"), ("attention_prefill", "5,1,70")]
)
def test_long_means_may_be_off_like_a_plain_softmax_and_by_no_key(op, q_lens):
    checks, case = ["equal_keys_average_the_visible_values"], LONG_MEAN.format(q_lens=q_lens)
    results = outcomes(faulty(Fault(checks[0], op, plain_attention(0))), op, checks, case)
    assert not any(r.failed for r in results), format_results(results)
    results = outcomes(faulty(Fault(checks[0], op, plain_attention(1))), op, checks, case)
    assert all(r.failed for r in results), format_results(results)
