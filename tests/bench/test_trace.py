"""Traces with a GPU in them, written here by hand: of what a kernel is, and how idle it was."""

from __future__ import annotations

import json

import pytest

from tvr.bench.trace import read_trace
from tvr.bench.trace_table import trace_rows


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


#: Two calls on one thread, and a kernel that no op launched; the second call launches two. Another
#: thread launches while the first op runs.
EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 1},
    event("user_annotation", "step: 1 decodes", 0, 100),
    event("user_annotation", "rope [a]", 10, 10),
    event("user_annotation", "linear [b]", 30, 10),
    event("cpu_op", "aten::mm", 31, 5),
    event("cuda_driver", "cuLaunchKernel", 12, 2, correlation=7),
    event("cuda_runtime", "cudaLaunchKernel", 31, 2, correlation=8),
    event("cuda_runtime", "cudaLaunchKernel", 39, 2, correlation=9),
    event("cuda_runtime", "cudaMemcpyAsync", 50, 2, correlation=10),
    event("cuda_runtime", "cudaLaunchKernel", 13, 2, tid=2, correlation=11),
    event("kernel", "k_linear", 60, 20, tid=7, correlation=8),
    event("kernel", "k_rope", 40, 10, tid=7, correlation=7),
    event("kernel", "k_linear", 75, 15, tid=8, correlation=9),
    event("gpu_memcpy", "DtoH", 110, 10, tid=7, correlation=10),
    event("kernel", "k_else", 41, 5, tid=9, correlation=11),
    event("gpu_user_annotation", "rope [a]", 40, 10, tid=7),
]


@pytest.fixture
def trace(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": EVENTS, "tvr": {"model": "m"}}))
    return read_trace(tmp_path / "t.json")


def test_a_kernel_belongs_to_the_op_that_launched_it(trace):
    assert [(r.name, r.op) for r in trace.device] == [
        ("k_rope", "rope [a]"),
        ("k_else", ""),
        ("k_linear", "linear [b]"),
        ("k_linear", "linear [b]"),
        ("DtoH", ""),
    ]


def test_idle_is_when_nothing_ran(trace):
    # from 40 to 120; busy from 40 to 50, 60 to 90, 110 to 120
    assert trace.idle == pytest.approx(30 / 80)


def launched(at, begin, end, tid=1):
    """A kernel that was launched at a time of the host, and ran from `begin` to `end`."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, 1, tid=tid, correlation=at),
        event("kernel", f"k{at}", begin, end - begin, tid=7, correlation=at),
    ]


#: Prompts, two decodes, prompts beside decodes, a decode; the host launches well ahead.
STEPS = [
    event("user_annotation", "step: 9 prefill tokens", 0, 10),
    *launched(1, 100, 200),
    event("user_annotation", "step: 4 decodes", 20, 10),
    *launched(21, 250, 260),  # the 50 before it are no decode's
    *launched(22, 270, 290),
    event("user_annotation", "launch", 30, 5),
    *launched(31, 291, 292),  # brings the tokens to the host
    event("user_annotation", "step: 4 decodes in a graph", 40, 10),
    *launched(41, 300, 340),
    *launched(45, 330, 350),
    event("user_annotation", "step: 4 decodes, 9 prefill tokens", 60, 10),
    *launched(61, 400, 500),
    *launched(65, 600, 700),
    event("user_annotation", "step: 3 decodes", 80, 10),
    *launched(81, 720, 730),
    event("kernel", "nobody's", 732, 4, tid=8),
    *launched(82, 740, 750),
]


def written(folder, events):
    (folder / "t.json").write_text(json.dumps({"traceEvents": events, "tvr": {}}))
    return read_trace(folder / "t.json")


def test_a_kernel_belongs_to_the_step_behind_whose_beginning_it_was_launched(tmp_path):
    steps = {r.name: r.step for r in written(tmp_path, STEPS).device}
    assert steps["k1"] == "step: 9 prefill tokens"
    assert steps["k22"] == steps["k31"] == "step: 4 decodes"
    assert steps["nobody's"] == ""


def test_steps_of_decodes_have_an_idle_share_of_their_own(tmp_path):
    trace = written(tmp_path, STEPS)
    # from 250 to 350, with pauses of 10, 1 and 8; from 720 to 750, with pauses of 2 and 4
    assert trace.decode_idle == pytest.approx((19 + 6) / (100 + 30))
    assert trace.idle == pytest.approx((50 + 19 + 50 + 100 + 20 + 6) / 650)


def test_without_steps_of_decodes_they_have_no_idle_share(tmp_path):
    assert written(tmp_path, STEPS[:3]).decode_idle is None
    no_device = [e for e in STEPS if e["cat"] == "user_annotation"]
    assert written(tmp_path, no_device).decode_idle is None


def test_the_table_has_the_devices_time_by_op(trace):
    head, *rows = trace_rows(trace, ["step"])
    assert head == ["phase or op", "calls", "host ms", "us/call", "device ms"]
    assert rows == [
        ["step", "1", "0.100", "100.0", ""],
        ["linear [b]", "1", "0.010", "10.0", "0.035"],
        ["rope [a]", "1", "0.010", "10.0", "0.010"],
        ["(no op)", "", "", "", "0.015"],
    ]


def test_the_picture_names_ops_and_the_idle_share(trace, tmp_path):
    pytest.importorskip("matplotlib")
    import matplotlib

    from tvr.bench.plot_timeline import plot_timeline

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        plot_timeline(tmp_path / "t.svg", trace, ["schedule"], ["step"])
    text = (tmp_path / "t.svg").read_text()
    title = "m, device idle 38%, of decode steps 38%"
    for words in (title, ">device<", ">engine<", "ops: rope [a]", "step: step: 1"):
        assert words in text
