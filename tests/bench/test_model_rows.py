"""Figures of a model's rows, from seconds that are written here by hand."""

from __future__ import annotations

import json
import statistics

import pytest

from tvr.bench.model_rows import failed_row, latency_row, percentile, throughput_row
from tvr.bench.model_table import format_latency, format_throughput
from tvr.bench.rows import failed
from tvr.bench.workload import random_workload

MODEL = {"backend": "a", "model": "m", "load_format": "dummy", "dtype": "bfloat16"}
SIZES = {**MODEL, "batch": 4, "input_len": 8, "output_len": 11, "sampling": "greedy"}
FIRST = [0.10, 0.11, 0.12, 0.13, 0.14]
WHOLE = [0.30, 0.32, 0.32, 0.34, 0.34]


def test_itl_is_the_difference_of_two_lengths():
    row = latency_row(SIZES, FIRST, WHOLE, {"gate": {"tokens": 64}})
    assert row["ttft_ms"] == 120
    # 20, 21, 20, 21 and 20 ms for each of the ten tokens after the first one.
    assert row["itl_ms"] == pytest.approx(20)
    assert (row["p10_itl_ms"], row["p90_itl_ms"]) == pytest.approx((20, 21))
    assert row["tok_s"] == pytest.approx(4 / 0.020)
    assert row["gate"] == {"tokens": 64}
    assert {name: row[name] for name in SIZES} == SIZES


def test_latency_has_vllms_keys():
    row = latency_row(SIZES, FIRST, WHOLE, {})
    assert row["avg_latency"] == pytest.approx(statistics.fmean(WHOLE))
    assert row["std_latency"] == pytest.approx(statistics.pstdev(WHOLE))
    assert list(row["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert row["percentiles"]["50"] == statistics.median(WHOLE)
    assert (row["latencies"], row["first_token_latencies"], row["samples"]) == (WHOLE, FIRST, 5)
    assert json.loads(json.dumps(row)) == row


def test_what_a_step_takes_the_device_is_a_figure_where_it_is_known():
    row = latency_row(SIZES, FIRST, WHOLE, {}, device_ms=[18.0, 17.0, 19.0])
    assert (row["p10_device_ms"], row["device_ms"], row["p90_device_ms"]) == (17.2, 18.0, 18.8)
    assert "device_ms" not in latency_row(SIZES, FIRST, WHOLE, {})


def test_the_idle_share_stands_beside_itl_where_one_is_known():
    mine = latency_row(SIZES, FIRST, WHOLE, {}, device_ms=[18.0])
    other = latency_row({**SIZES, "backend": "b"}, FIRST, WHOLE, {})
    backwards = latency_row({**SIZES, "backend": "c"}, WHOLE, FIRST, {}, device_ms=[18.0])
    wrong = failed_row({**SIZES, "backend": "d"}, ("ttft_ms", "itl_ms", "tok_s"), "is off")
    rows = [mine, other, backwards, wrong]
    _, head, line, *_ = format_latency([rows], ["a", "b", "c", "d"]).splitlines()
    assert head.split().count("idle") == 4
    assert line.split()[3:7] == ["120", "20", "10.0%", "200"]
    assert line.split()[7:13] == ["120", "1.00", "20", "1.00", "-", "200"]
    assert line.split()[17] == line.split()[23] == "-"
    assert "idle" not in format_latency([[other]], ["b"])


def test_noise_that_makes_itl_negative_gives_no_rate():
    row = latency_row(SIZES, WHOLE, FIRST, {})
    assert row["itl_ms"] < 0
    assert row["tok_s"] is None


@pytest.mark.parametrize("percent", [0, 10, 50, 90, 100])
def test_percentiles_lie_between_values(percent):
    numpy = pytest.importorskip("numpy")
    assert percentile(FIRST[::-1], percent) == pytest.approx(numpy.percentile(FIRST, percent))


def test_throughput_counts_prompts_and_answers_as_vllm_does():
    work = random_workload(10, 30, 20, 100, 0)
    row = throughput_row({**MODEL, "workload": "random"}, work, [2.5, 2.0, 1.9], {})
    assert (row["output_tok_s"], row["seconds"], row["elapsed_time"]) == (100, 2.0, 2.0)
    assert (row["num_requests"], row["total_num_tokens"]) == (10, 500)
    assert (row["requests_per_second"], row["tokens_per_second"]) == (5, 250)
    assert row["p10_seconds"] < row["seconds"] < row["p90_seconds"]


def test_backends_stand_side_by_side_with_the_first_ones_share():
    mine = latency_row(SIZES, FIRST, WHOLE, {})
    other = latency_row(
        {**SIZES, "backend": "b"},
        [2 * s for s in FIRST],
        [2 * s for s in WHOLE],
        {"other_backends": {"argmax": "torch"}},
    )
    wrong = failed_row({**SIZES, "backend": "c"}, ("ttft_ms", "itl_ms", "tok_s"), "is off")
    heading, head, line, _, *remarks = format_latency(
        [[mine, other, wrong]], ["a", "b", "c"]
    ).splitlines()
    assert heading == "m, bfloat16, random weights"
    assert "b TTFT ms" in head
    assert line.split() == [
        *("4", "8", "11", "120", "20", "200"),
        *("240", "0.50", "40", "0.50", "100"),
        *("failed", "-", "failed", "-", "failed"),
    ]
    assert remarks == ["b: argmax is served by torch", "c: failed at batch 4: is off"]
    assert failed([mine, other, wrong])
    assert not failed([mine, other])


def test_throughput_has_a_line_for_each_backend():
    work = random_workload(10, 30, 20, 100, 0)
    fields = {**MODEL, "workload": "random"}
    rows = [
        [throughput_row(fields, work, [2.0], {})],
        [throughput_row({**fields, "backend": "b"}, work, [1.0], {})],
        [failed_row({**fields, "backend": "c"}, ("output_tok_s", "seconds"), "worn out")],
    ]
    _, _, first, second, third, _, remark = format_throughput(rows).splitlines()
    assert first.split() == ["a", "100", "2", "5", "250", "1.00"]
    assert second.split() == ["b", "200", "1", "10", "500", "2.00"]
    assert third.split() == ["c", "failed", "failed", "failed", "failed", "-"]
    assert remark == "c: failed: worn out"
