"""Op specs: equality, neutral values, refusals."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from support.specs import spec_of
from tvr.contract import COMPOSITES, OPS, PROTOCOLS, SPECS
from tvr.errors import ConfigError


@pytest.mark.parametrize("op", OPS)
def test_a_spec_is_frozen_hashable_and_equal_by_its_facts(op):
    spec = spec_of(op)
    assert spec == spec_of(op)
    assert hash(spec) == hash(spec_of(op))
    assert spec.non_neutral() == {}
    with pytest.raises(FrozenInstanceError):
        spec.dtype = "float16"


def test_every_op_has_a_spec_a_protocol_and_a_name():
    assert set(OPS) == set(SPECS) == set(PROTOCOLS)
    assert all(SPECS[op].op == op for op in OPS)


@pytest.mark.parametrize("op", OPS)
def test_a_composite_is_one_that_has_parts(op):
    found = [part.op for part in spec_of(op).parts()]
    assert bool(found) == (op in COMPOSITES)
    assert set(found) <= set(COMPOSITES.get(op, ()))


@pytest.mark.parametrize(
    ("fused", "parts"),
    [
        ({}, ["linear"]),
        ({"rms_norm": True}, ["rms_norm", "linear"]),
        ({"add": True}, ["linear"]),
        ({"silu_mul": True, "bias": True}, ["linear", "silu_mul"]),
        ({"rms_norm": True, "silu_mul": True, "max_rows": 8}, ["rms_norm", "linear", "silu_mul"]),
    ],
)
def test_the_parts_of_a_fused_product_follow_from_its_spec(fused, parts):
    whole = spec_of("fused_linear", dtype="bfloat16", batch_invariant=True, **fused)
    own = {"dtype": "bfloat16", "batch_invariant": True}
    of_product = {name: fused[name] for name in ("bias", "max_rows") if name in fused}
    wanted = {
        "rms_norm": spec_of("rms_norm", **own, hidden_size=64),
        "linear": spec_of("linear", **own, **of_product),
        "silu_mul": spec_of("silu_mul", **own, intermediate_size=16),
    }
    assert list(whole.parts()) == [wanted[op] for op in parts]


def test_attention_has_all_of_its_fields_from_the_first_version():
    wanted = {
        "dtype", "num_heads", "num_kv_heads", "head_dim", "block_size", "kv_dtype", "window",
        "softcap", "causal", "max_q_len", "return_lse", "batch_invariant", "max_splits",
    }  # fmt: skip
    for op in ("attention_decode", "attention_prefill"):
        assert {f.name for f in fields(SPECS[op])} == wanted


def test_non_neutral_names_exactly_the_changed_fields():
    spec = spec_of("attention_decode", window=128, causal=False)
    assert spec.non_neutral() == {"window": 128, "causal": False}


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("kv_write", {"kv_dtype": "float32"}),
        ("attention_decode", {"kv_dtype": "float32"}),
        ("linear", {"out_dtype": "float32"}),
        ("rope", {"rotary_dim": 16}),
        ("rope_kv_write", {"rotary_dim": 16, "kv_dtype": "float32"}),
    ],
)
def test_a_neutral_value_said_aloud_makes_the_same_spec(op, said):
    assert spec_of(op, **said) == spec_of(op)


@pytest.mark.parametrize(
    ("op", "wrong", "message"),
    [
        ("rms_norm", {"dtype": "float64"}, "dtype 'float64' is not one of float32"),
        ("rms_norm", {"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
        ("attention_decode", {"softcap": 0.0}, "softcap is 0.0; it must be above 0"),
        ("attention_decode", {"softcap": float("nan")}, "softcap is nan; it must be above 0"),
        ("rope", {"num_heads": 5}, "num_heads must be a multiple of num_kv_heads"),
        ("rope", {"head_dim": 15}, "rotary_dim 15 must be even"),
        ("rope", {"rotary_dim": 32}, "at most head_dim 16"),
        ("kv_write", {"block_size": 24}, "block_size 24 is not a power of two"),
        ("fused_linear", {"silu_mul": True, "add": True}, "silu_mul and add are both asked for"),
        ("fused_linear", {"silu_mul": True, "out_features": 5}, "out_features 5 is odd"),
        ("fused_linear", {"add": True, "out_dtype": "bfloat16"}, "out_dtype bfloat16 does not go"),
        ("attention_prefill", {"num_heads": 33}, "33 query heads cannot be shared out among 2"),
    ],
)
def test_a_spec_that_no_op_could_serve_is_refused_with_the_field(op, wrong, message):
    with pytest.raises(ConfigError, match=message):
        spec_of(op, **wrong)
