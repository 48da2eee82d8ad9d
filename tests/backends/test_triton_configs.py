"""The Triton backend's table of tuned configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install 'tvr[triton]'")

from tvr.backends.triton import configs
from tvr.backends.triton.configs import read_table, shipped, tuned
from tvr.backends.triton.launch import Config
from tvr.errors import PluginError

DEFAULT = Config(blocks={"PROGRAMS": 2})
ENTRY = {
    "op": "attention_decode",
    "sm": 90,
    "shape": {"dtype": "bfloat16", "head_dim": 128},
    "num_warps": 8,
    "num_stages": 2,
    "blocks": {"PROGRAMS": 3},
    "us": 9.5,
    "default_us": 11.0,
}
FACTS = {"gpu": "H200", "triton": "3.6.0", "torch": "2.11.0"}


def table_of(*entries: dict, **facts: object) -> str:
    return json.dumps({"header": {"sm_90": FACTS | facts}, "entries": list(entries)})


@pytest.fixture
def one_entry(monkeypatch):
    monkeypatch.setattr(configs, "shipped", lambda: read_table(table_of(ENTRY)))


def test_an_entry_is_found_by_op_gpu_and_shape_class(one_entry):
    expected = Config(num_warps=8, num_stages=2, blocks={"PROGRAMS": 3})
    for dtype in ("bfloat16", "float16"):  # equally wide numbers
        assert tuned("attention_decode", 90, DEFAULT, head_dim=128, dtype=dtype) == expected


@pytest.mark.parametrize(
    ("op", "sm", "shape"),
    [
        ("attention_decode", 90, {}),
        ("attention_decode", 80, ENTRY["shape"]),
        ("attention_decode", 100, ENTRY["shape"]),
        ("attention_decode", 90, {"dtype": "float32", "head_dim": 128}),
        ("attention_decode", 90, {"dtype": "bfloat16"}),
        ("attention_decode", 90, ENTRY["shape"] | {"group_size": 4}),
        ("attention_decode", 0, ENTRY["shape"]),  # the interpreter
    ],
)
def test_what_was_not_measured_has_the_default(one_entry, op, sm, shape):
    assert tuned(op, sm, DEFAULT, **shape) is DEFAULT


def test_the_shipped_table_is_read_once_and_only_has_what_is_faster():
    assert shipped() is shipped()
    table = json.loads(Path(configs.__file__).with_name("tuned.json").read_text())
    assert all(entry["us"] < entry["default_us"] for entry in table["entries"])


def test_a_time_may_be_a_whole_number():
    assert len(read_table(table_of(ENTRY | {"us": 9}))) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "it is not an object of header and entries"),
        (table_of(gpu=None), "its header does not give gpu, triton, torch for each sm_NN"),
        (table_of({"op": "rope"}), "entry 0 is not an object of op, sm, shape, num_warps"),
        (table_of(ENTRY | {"num_warps": 3}), "entry 0: num_warps is 3; it must be a power of two"),
        (table_of(ENTRY | {"num_stages": True}), "entry 0: num_stages is True"),
        (table_of(ENTRY | {"op": "atention"}), "entry 0: op is 'atention'; it must be one of rms"),
        (table_of(ENTRY | {"op": []}), "entry 0: op is []; it must be one of rms_norm, "),
        (table_of(ENTRY | {"us": True}), "entry 0: us is True; it must be a time"),
        (table_of(ENTRY | {"blocks": {"PROGRAMS": "2"}}), "entry 0: blocks is {'PROGRAMS': '2'}"),
        # A kernel launched without one of its constants would fail with Triton's words.
        (
            table_of(ENTRY | {"op": "linear_plain"}),
            "entry 0: blocks are PROGRAMS; the kernel of linear_plain has BK, BN",
        ),
        (table_of(ENTRY | {"blocks": {}}), "are none; the kernel of attention_decode has PROGRAMS"),
        (
            table_of(ENTRY | {"op": "silu_mul", "blocks": {"BLOCK": 1000}}),
            "entry 0: BLOCK is 1000; it must be a power of two",
        ),
        (table_of(ENTRY | {"shape": []}), "entry 0: shape is []"),
        (table_of(ENTRY | {"sm": 80}), "entry 0: sm_80 is not in the header"),
        (table_of(ENTRY, ENTRY | {"us": 2.0}), "entry 1 has op, sm and shape of an earlier one"),
    ],
)
def test_a_broken_table_is_one_line_that_says_what_to_do(tmp_path, monkeypatch, text, reason):
    (tmp_path / "tuned.json").write_text(text)
    monkeypatch.setattr(configs, "__file__", str(tmp_path / "configs.py"))
    with pytest.raises(PluginError) as caught:
        shipped.__wrapped__()
    message = str(caught.value)
    assert message.startswith(f"the table of the Triton backend, {tmp_path}/tuned.json, is broken")
    assert reason in message
    assert message.endswith("make the table again with tools/tune_triton.py")
    assert "\n" not in message


def test_a_missing_table_is_told_as_a_broken_one(tmp_path, monkeypatch):
    monkeypatch.setattr(configs, "__file__", str(tmp_path / "configs.py"))
    with pytest.raises(PluginError, match="No such file"):
        shipped.__wrapped__()
