"""A case is a line of text: what is reported can be copied and run again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tvr.backends.torch_ref import plugin
from tvr.conformance import check_backend, strategies
from tvr.conformance.case import Case, parse_case
from tvr.conformance.cases import cases
from tvr.conformance.inputs import make_call
from tvr.contract import OPS, AttentionDecodeSpec, RmsNormSpec
from tvr.errors import ConfigError

DECODE = "dtype=float16 num_heads=6 num_kv_heads=2 head_dim=64 block_size=16"


@pytest.mark.parametrize("op", OPS)
def test_a_drawn_case_is_read_back_from_its_text(op):
    @settings(max_examples=50, database=None, deadline=None)
    @given(strategies.any_cases(op, "full"))
    def test(case):
        assert parse_case(op, case.text) == case

    test()


@pytest.mark.parametrize("op", OPS)
def test_a_named_case_keeps_its_spec_and_sizes_as_text(op):
    for case in cases(op, "full", seed=3):
        read = parse_case(op, case.text)
        sizes = (read.spec, read.num_tokens, read.q_lens, read.kv_lens, read.seed)
        assert sizes == (case.spec, case.num_tokens, case.q_lens, case.kv_lens, 3)


def test_a_text_is_what_a_reader_would_write():
    spec = AttentionDecodeSpec(
        dtype="float16", num_heads=6, num_kv_heads=2, head_dim=64, block_size=16, window=5
    )
    case = Case(spec=spec, q_lens=(1, 1), kv_lens=(33, 0), seed=7)
    assert case.text == f"{DECODE} window=5 q_lens=1,1 kv_lens=33,0 seed=7"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "'nonsense' is not one of NAME=VALUE"),
        (f"{DECODE} colour=red q_lens=1 kv_lens=1", "'colour=red' is not one of"),
        (f"{DECODE} seed=1 seed=2 q_lens=1 kv_lens=1", "'seed=2' is not one of"),
        (f"{DECODE} q_lens=1", "kv_lens missing"),
        ("dtype=float16 q_lens=1 kv_lens=1", "num_heads, num_kv_heads, head_dim, block_size miss"),
        (f"{DECODE} q_lens=1 kv_lens=two", "kv_lens is 'two'; it must be numbers"),
        (f"{DECODE} q_lens=1,1 kv_lens=5", "2 q_lens and 1 kv_lens"),
        (f"{DECODE} q_lens=1 kv_lens=-5", "below 0"),
        (f"{DECODE} q_lens=2 kv_lens=5", "must all be max_q_len, 1"),
        (f"{DECODE} causal=maybe q_lens=1 kv_lens=5", "causal is 'maybe'; it must be bool"),
        (f"{DECODE} window=x q_lens=1 kv_lens=5", "window is 'x'; it must be int"),
        (DECODE.replace("=6", "=5") + " q_lens=1 kv_lens=5", "5 query heads cannot be shared"),
    ],
)
def test_a_text_that_is_no_case_is_refused_in_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_case("attention_decode", text)
    assert "\n" not in str(caught.value)


def test_another_seed_draws_other_numbers_and_the_same_seed_the_same():
    spec = RmsNormSpec(dtype="float32", hidden_size=64)
    seeds = (1, 1, 2)
    first, again, other = (Case(name="a", spec=spec, num_tokens=2, seed=s) for s in seeds)
    x = [make_call(case, "cpu")["x"] for case in (first, again, other)]
    assert x[0].equal(x[1])
    assert not x[0].equal(x[2])


def test_a_case_is_asked_for_by_its_name_or_by_its_text():
    text = "dtype=float32 hidden_size=64 num_tokens=2 seed=5"
    results = check_backend(plugin, ops=["rms_norm"], cases=["rms_norm-5x64-float16", text])
    assert {r.case for r in results} == {"rms_norm-5x64-float16", text}
    assert {r.outcome for r in results} == {"passed", "skipped"}


def test_a_case_needs_the_op_it_belongs_to():
    with pytest.raises(ConfigError, match="a case belongs to one op"):
        check_backend(plugin, cases=["rms_norm-5x64-float16"])
