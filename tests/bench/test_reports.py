"""Table, JSON and picture, of rows that are written here by hand."""

from __future__ import annotations

import json

import pytest

from tvr.bench.report import write_json
from tvr.bench.table import format_table

HEADER = {"device_name": "NVIDIA H200", "ceiling": {"copy_tb_s": 4.1, "read_tb_s": 4.3}}


def row(backend, us, batch=1, ctx=1024, op="attention_decode", **changed):
    num_bytes = batch * ctx * 2048
    return {
        **{"backend": backend, "op": op, "dtype": "bfloat16", "head_dim": 64, "num_heads": 32},
        **{"num_kv_heads": 8, "block_size": 16, "batch": batch, "ctx": ctx, "us": us},
        **{"tb_s": us and num_bytes / us / 1e6, "bytes": num_bytes, "tflop_s": us and 5e4 / us},
        **changed,
    }


CELLS = [
    [row("a", 8.0), row("b", 10.0)],
    [row("a", 20.0, 8), row("b", 16.0, 8, note="cannot be captured")],
    [row("a", 40.0, 64), row("b", None, 64, error="sequence 0: is off")],
    [row("a", 90.0, 256), row("b", None, 256, skipped="head_dim 64 is not among 128")],
]


def test_backends_stand_side_by_side_with_the_first_ones_share():
    heading, head, *lines = format_table(CELLS, ["a", "b"]).split("\n\n")[0].splitlines()
    assert heading == (
        "attention_decode, dtype bfloat16, head_dim 64, num_heads 32, num_kv_heads 8, "
        "block_size 16, ctx 1024"
    )
    assert head.split() == ["batch", "a", "us", "TB/s", "b", "us", "TB/s", "a/b"]
    assert [line.split() for line in lines] == [
        ["1", "8.00", "0.262", "10.00", "0.21", "0.80"],
        ["8", "20.00", "0.839", "16.00*", "1.05", "1.25"],
        ["64", "40.00", "3.36", "failed", "-", "-"],
        ["256", "90.00", "5.97", "-", "-", "-"],
    ]


def test_what_went_otherwise_is_said_once_each():
    *_, remarks = format_table([*CELLS, CELLS[2]], ["a", "b"]).split("\n\n")
    assert remarks.splitlines() == [
        "attention_decode of b: * is eager: cannot be captured",
        "attention_decode of b: failed: sequence 0: is off (2 cells)",
        "attention_decode of b: skipped: head_dim 64 is not among 128",
    ]


def test_prefill_is_in_operations_a_second():
    text = format_table([[row("a", 100.0, op="attention_prefill")]], ["a"])
    assert text.splitlines()[-1].split()[-2:] == ["100.00", "500"]
    assert "TFLOP/s" in text


def test_ops_have_a_table_each():
    text = format_table([[row("a", 1.0)], [row("a", 1.0, op="attention_prefill")]], ["a"])
    assert [block.splitlines()[0] for block in text.split("\n\n")] == [
        "attention_decode",
        "attention_prefill",
    ]


def test_the_json_is_one_object_with_a_row_a_line(tmp_path):
    rows = [r for rows in CELLS for r in rows]
    write_json(tmp_path / "x.json", HEADER, rows)
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == {"header": HEADER, "rows": rows}
    assert sum(line.startswith('{"backend"') for line in text.splitlines()) == len(rows)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_drawn_with_the_better_ceiling_and_the_backends_names(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    import matplotlib

    from tvr.bench.plot import plot_bandwidth

    rows = [r for rows in CELLS for r in rows] + [row("a", 9.0, head_dim=128)]
    file = tmp_path / f"x{suffix}"
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        plot_bandwidth(file, HEADER, rows)
    if suffix == ".png":
        assert file.read_bytes().startswith(b"\x89PNG")
        return
    text = file.read_text()
    assert "ceiling: a read by torch, 4.3 TB/s" in text
    for words in (">a<", ">b<", "head_dim 64, 32/8 heads", "head_dim 128", "NVIDIA H200"):
        assert words in text


def test_a_picture_without_a_measured_decode_still_shows_the_ceiling(tmp_path):
    pytest.importorskip("matplotlib")
    from tvr.bench.plot import plot_bandwidth

    plot_bandwidth(tmp_path / "x.png", HEADER, [row("a", None, error="is off")])
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
