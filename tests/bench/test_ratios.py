"""Two results held against each other: which rows are the same, and what is a difference."""

from __future__ import annotations

import json

import pytest

from tvr.bench.ratios import compare_rows, format_comparison
from tvr.bench.results import load_results
from tvr.errors import ConfigError


def row(us, backend="a", batch=1, spread=0.1, **more):
    return {
        **{"backend": backend, "op": "attention_decode", "batch": batch, "us": us},
        **{"tb_s": 8 / us, "p10_us": us - spread, "p90_us": us + spread, "mode": "graph"},
        **more,
    }


@pytest.fixture
def results(tmp_path):
    def write(name, *rows):
        file = tmp_path / name
        file.write_text(json.dumps({"header": {"device_name": "H200"}, "rows": rows}))
        return load_results(file)

    return write


def test_ratios_say_faster_slower_or_no_difference(results):
    a = results("a.json", row(8.0), row(4.0, batch=8), row(2.0, batch=64))
    b = results("b.json", row(8.1), row(5.0, batch=8, mode="eager"), row(1.0, batch=64))
    _, table = format_comparison(a, b).split("\n\n")
    heading, *lines = table.splitlines()
    assert heading == "backend a, op attention_decode"
    assert [line.split(maxsplit=5) for line in lines] == [
        ["batch", "quantity", "A", "B", "B/A"],
        ["1", "us", "8", "8.1", "1.012", "no difference"],
        ["tb_s", "1", "0.9877", "0.988", "no", "difference"],
        ["8", "us", "4", "5", "1.250", "slower"],
        ["tb_s", "2", "1.6", "0.800", "slower"],
        ["64", "us", "2", "1", "0.500", "faster"],
        ["tb_s", "4", "8", "2.000", "faster"],
    ]


def test_spreads_that_touch_are_no_difference():
    (us, _) = compare_rows(row(8.0, spread=0.5), row(9.0, spread=0.5))
    assert us.verdict == "no difference"
    (us, _) = compare_rows(row(8.0, spread=0.5), row(9.0, spread=0.4))
    assert us.verdict == "slower"


def test_without_a_spread_there_is_a_ratio_and_no_verdict():
    (compared,) = compare_rows({"us": 8.0}, {"us": 4.0})
    assert (compared.ratio, compared.verdict) == (0.5, "")


def test_every_quantity_of_a_model_is_compared():
    a = {"ttft_ms": 10.0, "itl_ms": 2.0, "tok_s": 500.0, "avg_latency": 0.3, "latencies": [0.3]}
    a |= {"p10_itl_ms": 1.9, "p90_itl_ms": 2.1, "percentiles": {"10": 0.2, "90": 0.4}}
    b = a | {"itl_ms": 1.0, "tok_s": 1000.0, "p10_itl_ms": 0.9, "p90_itl_ms": 1.1}
    found = {c.name: (c.ratio, c.verdict) for c in compare_rows(a, b)}
    assert found == {
        "ttft_ms": (1, ""),
        "itl_ms": (0.5, "faster"),
        "tok_s": (2, "faster"),
        "avg_latency": (1, "no difference"),
    }


def test_how_a_model_was_run_keeps_no_rows_apart(results):
    a = results("a.json", row(8.0, enforce_eager=False, batch_invariant=False))
    b = results("b.json", row(4.0, enforce_eager=True, batch_invariant=True))
    assert "0.500  faster" in format_comparison(a, b)


def test_files_of_one_backend_each_are_compared_as_these(results):
    text = format_comparison(results("a.json", row(8.0)), results("b.json", row(4.0, "b")))
    assert "B: " in text.splitlines()[1]
    assert text.splitlines()[1].endswith("(H200, b)")
    assert "0.500  faster" in text


def test_a_row_without_a_number_says_in_which_file(results):
    wrong = {**row(1.0), "us": None, "tb_s": None, "error": "is off"}
    a, b = (
        results("a.json", wrong, row(1.0, batch=2)),
        results("b.json", row(1.0), row(1.0, batch=2)),
    )
    line = next(x for x in format_comparison(a, b).splitlines() if "not measured" in x)
    assert line.split() == ["1", "not", "measured", "-", "measured", "-"]


def test_what_is_in_one_file_alone_is_counted(results):
    a = results("a.json", row(1.0), row(1.0, batch=2), row(1.0, batch=4))
    text = format_comparison(a, results("b.json", row(1.0), row(1.0, batch=8)))
    assert text.endswith("2 of 3 rows are in A alone\n1 of 2 rows are in B alone\n")


def test_ops_of_other_sizes_have_a_table_each(results):
    mine = (row(1.0), {"backend": "a", "op": "argmax", "rows": 4, "us": 2.0})
    text = format_comparison(results("a.json", *mine), results("b.json", *mine))
    assert [block.splitlines()[0] for block in text.split("\n\n")[1:]] == [
        "backend a, batch 1, op attention_decode",
        "backend a, op argmax, rows 4",
    ]


def test_files_that_share_no_rows_say_what_differs(results):
    a = results("a.json", row(1.0, dtype="bfloat16"))
    with pytest.raises(ConfigError, match="share no rows: dtype is bfloat16 and float16"):
        format_comparison(a, results("b.json", row(1.0, dtype="float16")))
    both = results("c.json", row(1.0, "b", dtype="bfloat16"), row(1.0, "c", dtype="bfloat16"))
    with pytest.raises(ConfigError, match="backend is a and b, c"):
        format_comparison(a, both)
    other = results("d.json", {"backend": "a", "dtype": "bfloat16", "us": 1.0})
    for pair in ((a, other), (other, a)):
        with pytest.raises(ConfigError, match=r"only rows of .*a\.json have batch, so they"):
            format_comparison(*pair)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        '{"header": {}}',
        '{"header": {}, "rows": []}',
        '{"header": 3, "rows": [{"backend": "a"}]}',
        '{"header": {}, "rows": [3]}',
        '{"header": {}, "rows": [{"us": 1}]}',
        '{"header": {}, "rows": [{"backend": 3}]}',
        '{"header": {}, "rows": [{"backend": "a", "x": [1]}]}',
        '{"header": {}, "rows": {"backend": "a"}}',
        '{"header": {}, "rows": [{"backend": "a", "us": "fast"}]}',
        '{"header": {}, "rows": [{"backend": "a", "us": true}]}',
        '{"header": {}, "rows": [{"backend": "a", "us": NaN}]}',
        '{"header": {}, "rows": [{"backend": "a", "percentiles": 7}]}',
        "[" * 100_000,
    ],
)
def test_what_is_no_result_is_refused_in_one_line(tmp_path, text):
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="holds no results of tvr bench") as caught:
        load_results(file)
    assert "\n" not in str(caught.value)


def test_figures_that_may_mean_something_else_are_refused(tmp_path):
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"header": {"schema": 2}, "rows": [row(1.0)]}))
    with pytest.raises(ConfigError, match="has schema 2, and this tvr reads 1"):
        load_results(file)


def test_a_file_that_measures_the_same_twice_is_refused(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"header": {}, "rows": [row(1.0), row(2.0)]}))
    with pytest.raises(ConfigError, match="the same thing twice"):
        load_results(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read_is_said(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_results(tmp_path / name)
