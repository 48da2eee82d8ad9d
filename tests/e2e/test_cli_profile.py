"""`tvr profile`: a trace of a tiny model on the CPU, read as Perfetto would."""

from __future__ import annotations

import json
from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from support.bench_models import SIZES, save_config
from support.cli import refused_here, run_here
from support.plugins import install
from tvr import LLM, SamplingParams
from tvr.bench import engine_profile
from tvr.bench.trace import Range, Trace, read_trace
from tvr.contract import OPS
from tvr.core.phases import HOST_PHASES, STEP_PHASES, marked_phases
from tvr.core.step_graphs import StepGraphs

#: Serves one op, as the reference does.
ONLY_ARGMAX = """
from tvr.backends.torch_ref import plugin
from tvr.contract import BackendInfo
from tvr.hookspecs import hookimpl

@hookimpl
def tvr_backend_info():
    ops = plugin.tvr_backend_info().ops
    return BackendInfo(name="mine", abi=(1, 0), ops={"argmax": ops["argmax"]})

tvr_bind_argmax = plugin.tvr_bind_argmax
"""

#: Those that a Llama calls on a CPU for a batch; the others are parts of them, or called within
#: graphs, or for a single row.
CALLED = set(OPS) - {"rope", "kv_write", "prepare_step", "sample", "top_logprobs", "fused_linear"}
NUM_STEPS, BATCH = 4, 3


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A profile on two backends: the command's output, the file, the picture."""
    folder = tmp_path_factory.mktemp("profile")
    with pytest.MonkeyPatch.context() as patch:
        install(
            folder / "site",
            "tvr-mine",
            entry_points={"mine": "tvr_mine"},
            sources={"tvr_mine.py": ONLY_ARGMAX},
        )
        patch.syspath_prepend(folder / "site")
        model = ("--model", save_config(folder / "small"), "--load-format", "dummy")
        sizes = ("--steps", NUM_STEPS, "--batch", BATCH, "--input-len", 9, "--output-len", 8)
        where = ("--device", "cpu", "--backend", "mine", "-o", folder / "t.json")
        done = run_here("profile", *model, *sizes, *where, "--plot", folder / "t.png")
    assert done.returncode == 0, done
    return done, folder


@pytest.fixture
def trace(traced):
    return read_trace(traced[1] / "t.json")


def inside(inner, outers):
    return any(
        o.thread == inner.thread and o.start <= inner.start <= inner.end <= o.end for o in outers
    )


def test_every_op_has_events_with_its_backend(trace):
    found = {call.name for call in trace.ops}
    assert found == {f"{op} [{'mine' if op == 'argmax' else 'torch'}]" for op in CALLED}
    num_layers, steps = SIZES["num_hidden_layers"], len(trace.phases(["step"]))
    names = [call.name for call in trace.ops]
    assert names.count("linear [torch]") == (4 * num_layers + 1) * steps
    assert names.count("attention_prefill [torch]") == num_layers
    assert names.count("argmax [mine]") == steps


def test_steps_hold_their_phases_and_phases_their_ops(trace):
    steps = trace.phases(["step"])
    assert [step.name for step in steps] == [
        f"step: {BATCH * 9} prefill tokens",
        *[f"step: {BATCH} decodes"] * (NUM_STEPS - 1),
    ]
    assert all(a.end <= b.start for a, b in pairwise(steps))
    for phase in STEP_PHASES:
        ranges = trace.phases([phase])
        assert len(ranges) == len(steps), phase
        assert all(inside(r, steps) for r in ranges), phase
    within = {"linear": ["forward", "logits"], "argmax": ["sample"]}
    for call in trace.ops:
        phases = within.get(call.name.split()[0], ["forward"])
        assert inside(call, trace.phases(phases)), call


def test_the_engine_runs_ahead_as_it_does_unseen(trace):
    host = trace.phases(HOST_PHASES)
    (thread,) = {r.thread for r in host}
    assert thread not in {r.thread for r in trace.phases(["step"])}
    names = [r.name for r in host]
    assert names[: names.index("collect")].count("launch") == 2
    assert all(inside(r, trace.phases(["collect"])) for r in trace.phases(["update"]))


def test_the_file_is_a_chrome_trace_that_says_what_it_is_of(traced):
    data = json.loads((traced[1] / "t.json").read_text())
    assert all("ph" in event and "name" in event for event in data["traceEvents"])
    header = data["tvr"]
    assert (header["model"], header["dtype"], header["device"]) == ("small", "float32", "cpu")
    assert header["backends"]["mine"]["distribution"] == "tvr-mine"
    assert header["protocol"] == {"batch": BATCH, "input_len": 9, "output_len": 8}


def test_the_table_has_a_line_for_each_phase_and_op(traced):
    heading, _, head, *lines = traced[0].stdout.splitlines()
    assert heading.startswith(f"{NUM_STEPS} steps of 3 x 9 + 8: ")
    assert head.split() == ["phase", "or", "op", "calls", "host", "ms", "us/call"]
    phases = (*HOST_PHASES, "step", *STEP_PHASES)
    assert [line.split()[0] for line in lines] == [*phases, *sorted(CALLED)]
    calls = {line.split()[0]: int(line.split()[-3]) for line in lines}
    assert calls["step"] == calls["argmax"] == NUM_STEPS


def test_the_picture_is_a_png(traced):
    pytest.importorskip("matplotlib")
    assert (traced[1] / "t.png").read_bytes().startswith(b"\x89PNG")


def test_afterwards_no_call_is_in_a_range(tmp_path):
    seen = []

    def mark(name):
        seen.append(name)
        return nullcontext()

    with LLM(save_config(tmp_path / "small"), load_format="dummy", device="cpu") as llm:
        with marked_phases(llm, mark):
            llm.generate([1, 2, 3])
        during = len(seen)
        assert {name.partition(":")[0] for name in seen} == {"step", *HOST_PHASES, *STEP_PHASES}
        llm.generate([1, 2, 3])
        assert len(seen) == during


def test_a_step_that_is_a_graph_says_so(tmp_path):
    seen = []

    def mark(name):
        seen.append(name)
        return nullcontext()

    decodes = SimpleNamespace(
        holds=lambda num_seqs: True,
        chooses=lambda rows: True,
        tokens=lambda packed: (torch.zeros(len(packed.rows), dtype=torch.int64), None),
    )
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with LLM(save_config(tmp_path / "small"), load_format="dummy", device="cpu") as llm:
        llm.parts.runner.graphs = StepGraphs(decodes, chunks=None)
        with marked_phases(llm, mark):
            llm.generate([[1, 2], [3]], params)
    steps = [name for name in seen if name.startswith("step")]
    assert steps == ["step: 3 prefill tokens", *["step: 2 decodes in a graph"] * 2]


@pytest.mark.parametrize(
    ("options", "eager"), [((), True), (("--enforce-eager",), True), (("--graphs",), False)]
)
def test_a_profile_says_eager_as_other_commands_do(tmp_path, monkeypatch, options, eager):
    loaded, load = [], engine_profile.load_for_profile

    def watched(*args, **kwargs):
        loaded.append(load(*args, **kwargs))
        return loaded[-1]

    monkeypatch.setattr(engine_profile, "load_for_profile", watched)
    model = ("--model", save_config(tmp_path / "small"), "--load-format", "dummy")
    sizes = ("--input-len", "4", "--output-len", "2", "--steps", "1", "--device", "cpu")
    done = run_here("profile", *model, *sizes, *options, "-o", tmp_path / "t.json")
    assert done.returncode == 0
    assert loaded[0].config.enforce_eager is eager


def test_with_graphs_only_phases_have_ranges(tmp_path):
    model = ("--model", save_config(tmp_path / "small"), "--load-format", "dummy")
    sizes = ("--graphs", "--input-len", "4", "--steps", "2", "--device", "cpu")
    done = run_here("profile", *model, *sizes, "-o", tmp_path / "t.json")
    assert (done.returncode, done.stderr) == (0, "")
    trace = read_trace(tmp_path / "t.json")
    assert len(trace.phases(["step"])) == 2
    assert trace.ops == []


def test_a_heading_counts_the_step_that_is_sent_off_ahead(tmp_path):
    model = ("--model", save_config(tmp_path / "small"), "--load-format", "dummy")
    sizes = ("--steps", "1", "--input-len", "4", "--output-len", "8", "--device", "cpu")
    done = run_here("profile", *model, *sizes, "-o", tmp_path / "t.json")
    assert done.stdout.startswith("2 steps of 1 x 4 + 8: ")
    trace = read_trace(tmp_path / "t.json")
    assert len(trace.phases(["step"])) == 2
    # A decode of one row, whose products but the LM head's are fused with what is beside them.
    fused = [call for call in trace.ops if call.name == "fused_linear [torch]"]
    assert len(fused) == 4 * SIZES["num_hidden_layers"]


def test_a_heading_says_how_idle_a_gpu_was(tmp_path, monkeypatch):
    prompts, decodes = (
        Range(name, start, start + 60.0, 7, step=step)
        for name, start, step in (
            ("k", 0.0, "step: 4 prefill tokens"),
            ("k", 100.0, "step: 1 decodes"),
        )
    )
    more = decodes._replace(start=180.0, end=200.0)
    trace = Trace(header={}, device=[prompts, decodes, more])
    monkeypatch.setattr("tvr.bench.trace.read_trace", lambda path: trace)
    model = ("--model", save_config(tmp_path / "small"), "--load-format", "dummy")
    sizes = ("--steps", "2", "--input-len", "4", "--output-len", "4", "--device", "cpu")
    done = run_here("profile", *model, *sizes, "-o", tmp_path / "t.json")
    heading = done.stdout.splitlines()[0]
    assert heading.startswith("2 steps of 1 x 4 + 4, device idle 30.0%, of decode steps 20.0%: ")


def test_a_trace_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    """torch says nothing of a full disk: an older trace was read as if it were the new one."""
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: None)
    file = tmp_path / "t.json"
    file.write_text("older")
    model = ("--model", save_config(tmp_path / "small"), "--load-format", "dummy")
    sizes = ("--steps", "2", "--input-len", "4", "--output-len", "4", "--device", "cpu")
    line = refused_here("profile", *model, *sizes, "-o", file)
    assert f"the trace {file} cannot be written" in line
    assert file.read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small", "t.json"]


def test_requests_that_end_before_are_traced_to_their_end(tmp_path):
    model = ("--model", save_config(tmp_path / "small"), "--load-format", "dummy")
    sizes = ("--steps", "9", "--input-len", "4", "--output-len", "2", "--device", "cpu")
    done = run_here("profile", *model, *sizes, "-o", tmp_path / "t.json")
    assert done.returncode == 0
    assert done.stderr == "tvr: the requests ended after 2 steps; a longer --output-len has more\n"
    assert len(read_trace(tmp_path / "t.json").phases(["step"])) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--steps", "0"], "--steps is 0; it must be at least 1"),
        (["--batch", "0"], "--batch is 0"),
        (["--batch", "99999999999"], "of memory are free; ask for fewer or shorter ones"),
        (["--output-len", "0"], "--output-len is 0"),
        (["-o", "t.txt"], "--output t.txt: the name must end in .json"),
        (["-o", "nowhere/t.json"], "there is no folder nowhere"),
        (["--plot", "t.txt"], "--plot t.txt: the name must end in one of .png"),
        (["--input-len", "9999"], "tokens, prompt and answer; the context has"),
        (["--backend", "nothing"], "backend 'nothing' is not known"),
        (["--model", "nowhere"], "nowhere does not exist"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_ends_with_2(tmp_path, monkeypatch, options, says):
    monkeypatch.chdir(tmp_path)
    assert says in refused_here("profile", "--device", "cpu", *options)
    assert list(tmp_path.iterdir()) == []
