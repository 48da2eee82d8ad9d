"""Boxes and `why_not`, the one judge of declared support."""

from __future__ import annotations

import pytest

from support.fakes import CPU, GPU
from support.specs import spec_of
from tvr.contract import BackendInfo, Box, DeviceFacts, declared_flags, matching_box, why_not
from tvr.errors import PluginError


def info_of(op: str, *boxes: Box) -> BackendInfo:
    return BackendInfo(name="fake", abi=(1, 0), ops={op: boxes})


def box(**axes) -> Box:
    return Box(**{"dtypes": ("float32",), "devices": ("cpu", "cuda"), **axes})


@pytest.mark.parametrize(
    ("op", "changes", "axes", "reason"),
    [
        ("rms_norm", {"dtype": "bfloat16"}, {}, "dtype bfloat16 is not among float32"),
        ("rms_norm", {}, {"devices": ("cuda",)}, "device cpu is not among cuda"),
        ("rope", {}, {"head_dims": (64, 128)}, "head_dim 16 is not among 64, 128"),
        ("kv_write", {}, {"block_sizes": (32,)}, "block_size 16 is not among 32"),
        ("attention_decode", {}, {"group_sizes": (1, 2, 4)}, "group_size 3 is not among 1, 2, 4"),
        ("linear", {"weight_format": "q4"}, {}, "weight_format q4 is not among dense"),
        ("linear", {}, {"max_rows": 8}, "takes at most 8 rows, asked for any"),
        ("linear", {"max_rows": 9}, {"max_rows": 8}, "takes at most 8 rows, asked for 9"),
        ("linear", {"bias": True}, {}, "bias=True is not supported"),
        ("rms_norm", {"batch_invariant": True}, {}, "is not declared batch_invariant"),
        ("attention_decode", {"window": 64}, {}, "window=64 is not supported"),
        ("attention_decode", {"softcap": 30.0}, {}, "softcap=30.0 is not supported"),
        ("attention_decode", {"causal": False}, {}, "causal=False is not supported"),
        ("attention_decode", {"return_lse": True}, {}, "return_lse=True is not supported"),
        ("attention_decode", {"max_splits": 4}, {}, "max_splits=4 is not supported"),
        ("attention_decode", {"max_q_len": 2}, {}, "max_q_len=2 is not supported"),
        ("attention_prefill", {"max_q_len": 9}, {}, "max_q_len=9 is not supported"),
        ("kv_write", {"kv_dtype": "float16"}, {}, "kv_dtype=float16 is not supported"),
        ("rope", {"rotary_dim": 8}, {}, "rotary_dim=8 is not supported"),
    ],
)
def test_an_undeclared_property_is_the_reason(op, changes, axes, reason):
    assert why_not(info_of(op, box(**axes)), spec_of(op, **changes), CPU) == [reason]


@pytest.mark.parametrize(
    ("op", "changes", "axes"),
    [
        ("rms_norm", {}, {}),
        ("rope", {}, {"head_dims": (16,), "group_sizes": ()}),
        ("linear", {"max_rows": 8}, {"max_rows": 8}),
        ("linear", {"weight_format": "q4"}, {"weight_formats": ("q4",)}),
        ("linear", {"weight_format": "q4"}, {"weight_formats": None}),
        ("linear", {"bias": True}, {"fields": frozenset({"bias"})}),
        ("rms_norm", {"batch_invariant": True}, {"flags": frozenset({"batch_invariant"})}),
        ("attention_decode", {"window": 4, "max_q_len": 2}, {"fields": {"window", "max_q_len"}}),
    ],
)
def test_a_declared_property_is_no_reason(op, changes, axes):
    assert why_not(info_of(op, box(**axes)), spec_of(op, **changes), CPU) == []


def test_a_field_away_from_neutral_that_the_box_does_not_name_is_refused():
    """So an older plugin is passed over, never run with a field it has not heard of."""
    info = info_of("attention_decode", box(fields=frozenset({"window"})))
    spec = spec_of("attention_decode", window=4, softcap=30.0)
    assert why_not(info, spec, CPU) == ["softcap=30.0 is not supported"]


@pytest.mark.parametrize(("sm", "reasons"), [(90, []), (100, []), (80, 1), (None, 1)])
def test_the_minimum_sm_is_held(sm, reasons):
    info = info_of("rms_norm", box(min_sm=90))
    found = why_not(info, spec_of("rms_norm"), DeviceFacts(type="cuda", index=0, sm=sm))
    assert len(found) == (reasons or 0)
    assert all("needs sm_90" in reason for reason in found)


def test_support_is_the_union_of_the_boxes():
    info = info_of("rope", box(head_dims=(16,)), box(dtypes=("bfloat16",), head_dims=(64,)))
    assert why_not(info, spec_of("rope"), CPU) == []
    assert why_not(info, spec_of("rope", dtype="bfloat16", head_dim=64), CPU) == []
    # Neither box has both: the boxes are not mixed.
    assert why_not(info, spec_of("rope", dtype="bfloat16"), CPU)


def test_the_reasons_are_those_of_the_nearest_box():
    far = box(dtypes=("float16",), head_dims=(64,), devices=("cuda",))
    near = box(head_dims=(128,))
    assert why_not(info_of("rope", far, near), spec_of("rope"), CPU) == [
        "head_dim 16 is not among 128"
    ]


def test_an_op_that_is_not_declared_is_the_reason():
    assert why_not(info_of("rope", box()), spec_of("argmax"), CPU) == ["does not implement argmax"]


def test_flags_are_those_of_every_box_that_covers_the_spec():
    plain = box()
    graphed = box(devices=("cuda",), flags=frozenset({"cuda_graph"}))
    other = box(dtypes=("bfloat16",), flags=frozenset({"deterministic"}))
    info = info_of("rms_norm", plain, graphed, other)
    assert declared_flags(info, spec_of("rms_norm"), CPU) == set()
    assert declared_flags(info, spec_of("rms_norm"), GPU) == {"cuda_graph"}
    assert matching_box(info, spec_of("rms_norm"), GPU) is plain
    assert matching_box(info, spec_of("rms_norm", dtype="float16"), GPU) is None


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"dtypes": ("half",)}, r"dtypes \['half'\] not known; allowed: float32"),
        ({"flags": {"fast"}}, r"flags \['fast'\] not known"),
        ({"norm_rounding": "never"}, "norm_rounding"),
        ({"dtypes": "float32"}, "dtypes is the string 'float32'; give a list"),
        ({"devices": "cuda"}, "devices is the string 'cuda'"),
        ({"fields": "softcap"}, "fields is the string 'softcap'"),
    ],
)
def test_a_box_with_a_typing_slip_is_refused(axes, message):
    with pytest.raises(PluginError, match=message):
        box(**axes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "Fast"}, "backend name 'Fast' is not valid"),
        ({"name": ""}, "backend name '' is not valid"),
        ({"abi": (1,)}, "is not a pair"),
        ({"abi": "1.0"}, "is not a pair"),
        ({"ops": {"rope": []}}, "with no box"),
        ({"ops": {"rope": ["float32"]}}, "must map to a list of Box"),
        ({"ops": {"rope": iter([Box(dtypes=["float32"])])}}, "must map to a list of Box"),
    ],
)
def test_an_info_with_a_slip_is_refused(given, message):
    with pytest.raises(PluginError, match=message):
        BackendInfo(**{"name": "fake", "abi": (1, 0), **given})


def test_a_single_box_in_place_of_a_list_is_refused():
    with pytest.raises(PluginError, match="must map to a list of Box"):
        BackendInfo(name="fake", abi=(1, 0), ops={"rope": box()})


def test_a_device_prints_as_torch_names_it():
    assert str(CPU) == "cpu"
    assert str(DeviceFacts(type="cuda", index=1)) == "cuda:1"
