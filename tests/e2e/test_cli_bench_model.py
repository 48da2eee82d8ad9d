"""`tvr bench latency`, `throughput` and `compare`: real runs of a tiny model on the CPU."""

from __future__ import annotations

import json

import pytest

from support.bench_models import save_config
from support.cli import refused_here, run_here
from support.plugins import install
from tvr.bench.engine_latency import Latency
from tvr.cli.bench_model import open_model
from tvr.core.llm import LLM

#: Two backends: "wrong" turns keys and queries the other way, "slow" is right and takes its time.
SOURCES = """
import time
from dataclasses import replace

from tvr.backends.torch_ref import plugin
from tvr.contract import BackendInfo
from tvr.hookspecs import hookimpl


class Wrong:
    @hookimpl
    def tvr_backend_info(self):
        ops = plugin.tvr_backend_info().ops
        return BackendInfo(name="wrong", abi=(1, 0), ops={"rope": ops["rope"]})

    @hookimpl
    def tvr_bind_rope(self, spec, device):
        right = plugin.tvr_bind_rope(spec=spec, device=device)

        def run(q, k, positions, cos_sin_cache, *, q_out, k_out):
            turned = cos_sin_cache.clone()
            turned[:, turned.shape[1] // 2 :].neg_()
            return right.run(q, k, positions, turned, q_out=q_out, k_out=k_out)

        return replace(right, run=run)


class Slow:
    @hookimpl
    def tvr_backend_info(self):
        ops = plugin.tvr_backend_info().ops
        return BackendInfo(name="slow", abi=(1, 0), ops={"argmax": ops["argmax"]})

    @hookimpl
    def tvr_bind_argmax(self, spec, device):
        right = plugin.tvr_bind_argmax(spec=spec, device=device)

        def run(logits, *, out):
            time.sleep(0.02)
            return right.run(logits, out=out)

        return replace(right, run=run)


class Broken:
    @hookimpl
    def tvr_backend_info(self):
        ops = plugin.tvr_backend_info().ops
        return BackendInfo(name="broken", abi=(1, 0), ops={"silu_mul": ops["silu_mul"]})

    @hookimpl
    def tvr_bind_silu_mul(self, spec, device):
        raise SystemExit("no such\\nkernel")


wrong, slow, broken = Wrong(), Slow(), Broken()
"""

AS_SERVED = {"enforce_eager": False, "batch_invariant": False}
ITERS = ("--num-iters", "5", "--num-iters-warmup", "0")


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory, monkeypatch):
    site = tmp_path_factory.mktemp("site")
    names = ("wrong", "slow", "broken")
    install(
        site,
        "tvr-some",
        entry_points={name: f"tvr_some:{name}" for name in names},
        sources={"tvr_some.py": SOURCES},
    )
    monkeypatch.syspath_prepend(site)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_config(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture
def bench(folder):
    """Run a benchmark of the tiny model, of which there is a config.json and nothing else."""

    def run(command, *options):
        model = ("--model", folder, "--load-format", "dummy", "--device", "cpu")
        return run_here("bench", command, *model, *options)

    return run


def rows_in(file):
    return json.loads(file.read_text())["rows"]


def test_latency_has_a_table_and_rows_of_every_size(bench, tmp_path):
    file = tmp_path / "l.json"
    sizes = ("--batch", "1,3", "--input-len", "5,20", "--output-len", "4")
    done = bench("latency", *sizes, *ITERS, "--backend", "torch", "--json", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "small, float32, random weights" in done.stdout
    rows = rows_in(file)
    assert [(r["batch"], r["input_len"], r["output_len"]) for r in rows] == [
        *((1, 5, 4), (3, 5, 4)),
        *((1, 20, 4), (3, 20, 4)),
    ]
    for row in rows:
        assert (row["backend"], row["model"], row["dtype"]) == ("torch", "small", "float32")
        assert row["p10_ttft_ms"] <= row["ttft_ms"] <= row["p90_ttft_ms"]
        assert row["avg_latency"] > row["ttft_ms"] / 1e3
        assert (row["samples"], len(row["latencies"])) == (5, 5)
        assert row["gate"]["tokens"] == 64
        assert "other_backends" not in row
    header = json.loads(file.read_text())["header"]
    assert header["protocol"] == {"warmup_iterations": 0, "iterations": 5}
    assert header["backends"]["torch"]["distribution"] == "tvr"
    assert not header["interrupted"]


@pytest.mark.parametrize("command", ["latency", "throughput"])
@pytest.mark.parametrize("asked", [True, False])
def test_engines_run_as_asked_and_rows_say_how(bench, tmp_path, monkeypatch, command, asked):
    configs, init = [], LLM.__init__

    def watched(self, *args, **kwargs):
        init(self, *args, **kwargs)
        configs.append((self.config.enforce_eager, self.config.batch_invariant))

    monkeypatch.setattr(LLM, "__init__", watched)
    sizes = {
        "latency": ("--batch", "1", *ITERS),
        "throughput": ("--num-prompts", "1", "--input-len", "4", "--num-iters", "1"),
    }[command]
    options = ("--enforce-eager", "--batch-invariant") if asked else ()
    file = tmp_path / "l.json"
    to = ("--output-len", "2", "--backend", "torch", "--json", file)
    done = bench(command, *sizes, *options, *to)
    assert done.returncode == 0
    (row,) = rows_in(file)
    assert (row["enforce_eager"], row["batch_invariant"]) == (asked, asked)
    assert ("random weights, op by op, batch-invariant" in done.stdout) is asked
    reference, measured = configs  # one that judges, and one that is judged
    assert reference == (asked, False)
    assert measured == (asked, asked)


def test_a_fault_while_it_is_timed_costs_the_number(bench, tmp_path, monkeypatch):
    from tvr.bench import engine_latency

    answered, calls = engine_latency.answered, []

    def fails_at_last(*args):
        calls.append(args[0])
        if len(calls) == 9:
            raise RuntimeError("worn\nout")
        return answered(*args)

    monkeypatch.setattr(engine_latency, "answered", fails_at_last)
    options = ("--batch", "1", "--output-len", "2", *ITERS, "--backend", "torch,slow")
    done = bench("latency", *options, "--json", tmp_path / "l.json")
    assert done.returncode == 1
    failed, right = rows_in(tmp_path / "l.json")
    assert (failed["error"], failed["itl_ms"]) == ("RuntimeError: worn out", None)
    assert right["samples"] == 5
    # They take turns: one token, then all.
    first, second = calls[:2]
    assert calls[:8] == [first, second] * 4


def test_the_devices_time_for_a_step_is_a_figure_and_a_fault_of_it_a_failure(
    bench, tmp_path, monkeypatch
):
    from tvr.bench import engine_latency

    def timed(llm, prompts, output_len, sampling):
        assert (len(prompts), output_len, sampling) == (2, 3, {})
        if llm.config.backend == "slow":
            raise RuntimeError("no event")
        return [1.0, 2.0, 1.5]

    monkeypatch.setattr(engine_latency, "decode_device_ms", timed)
    options = ("--batch", "2", "--output-len", "3", *ITERS, "--backend", "torch,slow")
    file = tmp_path / "l.json"
    done = bench("latency", *options, "--json", file)
    assert done.returncode == 1
    right, failed = rows_in(file)
    assert right["device_ms"] == 1.5
    assert failed["error"] == "RuntimeError: no event"
    assert "device_ms" not in failed
    assert done.stdout.count(" idle ") == 2
    compared = run_here("bench", "compare", file, file)
    (line,) = [text for text in compared.stdout.splitlines() if "device_ms" in text]
    assert line.split()[-6:] == ["device_ms", "1.5", "1.5", "1.000", "no", "difference"]


def test_a_backend_whose_rope_is_wrong_gets_no_number_and_the_others_do(bench, tmp_path):
    file = tmp_path / "l.json"
    names = ("--backend", "torch,wrong", "--backend", "broken")
    done = bench("latency", *names, "--output-len", "3", *ITERS, "--json", file)
    assert (done.returncode, done.stderr) == (1, "")
    right, wrong, broken = rows_in(file)
    assert right["itl_ms"] is not None
    assert (wrong["ttft_ms"], wrong["itl_ms"], wrong["tok_s"]) == (None, None, None)
    assert wrong["error"].startswith("prefill: a logit is ")
    assert "latencies" not in wrong
    assert broken["other_backends"]["silu_mul"] == "torch"  # it was passed over
    assert "wrong: failed at batch 8: prefill: a logit is " in done.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_throughput_of_a_wrong_backend_is_an_error_too(bench, tmp_path, dtype):
    file = tmp_path / "t.json"
    sizes = ("--num-prompts", "5", "--input-len", "6", "--output-len", "3", "--num-iters", "2")
    done = bench(
        *("throughput", *sizes, "--backend", "wrong,torch", "--dtype", dtype, "--json", file)
    )
    assert done.returncode == 1
    wrong, right = rows_in(file)
    assert wrong["output_tok_s"] is None
    assert wrong["error"].startswith("prefill: ")
    assert (right["workload"], right["num_requests"], right["total_num_tokens"]) == (
        "random",
        5,
        45,
    )
    assert right["output_tok_s"] == pytest.approx(15 / right["seconds"], rel=1e-2)
    assert right["samples"] == 2
    if dtype == "bfloat16":
        assert 0 < right["gate"]["max_error"] <= right["gate"]["limit"]


def test_a_slower_backend_shows_in_a_comparison_of_two_files(bench, tmp_path):
    files = {name: tmp_path / f"{name}.json" for name in ("torch", "slow")}
    for name, file in files.items():
        options = ("--batch", "2", "--output-len", "4", *ITERS, "--json", file)
        assert bench("latency", "--backend", name, *options).returncode == 0
    done = run_here("bench", "compare", files["torch"], files["slow"])
    assert (done.returncode, done.stderr) == (0, "")
    line = next(text for text in done.stdout.splitlines() if text.startswith("itl_ms"))
    _, mine, other, ratio, verdict = line.split()
    assert float(other) > float(mine) + 10
    assert float(ratio) == pytest.approx(float(other) / float(mine), rel=1e-2)
    assert verdict == "slower"
    same = run_here("bench", "compare", files["slow"], files["slow"])
    assert same.returncode == 0
    assert same.stdout.count("no difference") == 4


def test_ops_of_others_are_named(bench, tmp_path):
    sizes = ("--num-prompts", "2", "--input-len", "4", "--output-len", "2", "--num-iters", "1")
    done = bench("throughput", *sizes, "--backend", "slow", "--json", tmp_path / "t.json")
    assert done.returncode == 0
    (row,) = rows_in(tmp_path / "t.json")
    assert row["other_backends"]["attention_decode"] == "torch"
    assert "argmax" not in row["other_backends"]
    assert "slow: attention_decode is served by torch" in done.stdout


def test_nano_is_served_in_part(bench, tmp_path, folder):
    """Two of its requests, in a context that holds them."""
    large = save_config(tmp_path / "large", max_position_embeddings=2048)
    options = ("--workload", "nano", "--num-prompts", "2", "--num-iters", "1", "--backend", "torch")
    done = bench("throughput", *options, "--json", tmp_path / "n.json", "--model", large)
    assert done.returncode == 0
    (row,) = rows_in(tmp_path / "n.json")
    assert (row["workload"], row["num_prompts"], row["seed"]) == ("nano", 2, 0)
    line = refused_here("bench", "throughput", *options, "--model", folder)
    assert "workload 'nano' takes " in line
    assert "the context has 256 (max_position_embeddings)" in line


def test_an_interrupt_keeps_what_is_measured(bench, tmp_path, monkeypatch):
    rows = Latency.rows

    def interrupted(self):
        yield next(rows(self))
        raise KeyboardInterrupt

    monkeypatch.setattr(Latency, "rows", interrupted)
    file = tmp_path / "l.json"
    options = ("--batch", "1,2", "--output-len", "3", *ITERS, "--backend", "torch", "--json", file)
    done = bench("latency", *options)
    assert done.returncode == 130
    assert done.stdout.endswith("interrupted: 1 of 2 cells were not measured\n")
    assert json.loads(file.read_text())["header"]["interrupted"]
    assert len(rows_in(file)) == 1


def test_the_demo_model_is_the_default(tmp_path):
    sizes = ("--batch", "1", "--output-len", "2", *ITERS, "--device", "cpu")
    done = run_here("bench", "latency", *sizes, "--backend", "torch", "--json", tmp_path / "d.json")
    assert done.returncode == 0
    (row,) = rows_in(tmp_path / "d.json")
    assert (row["model"], row["load_format"], row["input_len"]) == ("demo", "auto", 32)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["latency", "--batch", "0"], "--batch '0' is no list of whole numbers above 0"),
        (["latency", "--input-len", "x"], "--input-len 'x' is no list"),
        (["latency", "--output-len", "1"], "--output-len is 1; it must be at least 2"),
        (["latency", "--num-iters", "4"], "--num-iters is 4; it must be at least 5"),
        (["latency", "--num-iters-warmup", "-1"], "--num-iters-warmup is -1"),
        (["latency", "--input-len", "200"], "takes 328 tokens, prompt and answer; the context"),
        (["latency", "--max-model-len", "100"], "has 100 (--max-model-len)"),
        (["latency", "--max-model-len", "300"], "max_model_len is 300; the model has 256"),
        (["latency", "--backend", "nothing"], "backend 'nothing' is not known; known: "),
        (["latency", "--dtype", "int8"], "dtype 'int8' is not known"),
        (["latency", "--device", "tpu"], "device 'tpu' is not known"),
        (["latency", "--load-format", "x"], "load_format is 'x'"),
        (["latency", "--load-format", "auto"], "has no *.safetensors file"),
        (["latency", "--model", "nowhere"], "nowhere does not exist"),
        (["latency", "--json", "nowhere/x.json"], "there is no folder nowhere"),
        (["latency", "--plugins", "nowhere.toml"], "nowhere.toml"),
        (["throughput", "--workload", "x"], "--workload 'x' is not known; known: random, nano"),
        (["throughput", "--workload", "nano", "--input-len", "9"], "has lengths of its own"),
        (["throughput", "--num-prompts", "0"], "--num-prompts is 0"),
        (["throughput", "--input-len", "0"], "--input-len is 0"),
        (["throughput", "--output-len", "-1"], "--output-len is -1"),
        (["throughput", "--num-iters", "0"], "--num-iters is 0"),
        (["throughput", "--num-prompts", "99999999999"], "of memory are free; ask for fewer"),
        (
            ["throughput", "--workload", "nano", "--num-prompts", "99999999999"],
            "of memory are free",
        ),
        (["throughput", "--input-len", "200"], "workload 'random' takes 328 tokens"),
        (["throughput", "--backend", "nothing"], "backend 'nothing' is not known"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_ends_with_2(folder, options, says):
    command, *rest = options
    model = ("--model", folder, "--load-format", "dummy", "--device", "cpu")
    assert says in refused_here("bench", command, *model, *rest)


def test_a_batch_that_memory_cannot_hold_is_an_error_of_its_row(bench):
    done = bench("latency", "--batch", "9999999999", *ITERS, "--backend", "torch")
    assert done.returncode == 1
    assert "failed at batch 9999999999: CapacityError: a KV cache of" in done.stdout


def test_a_batch_beyond_the_tokens_of_a_step_raises_both_limits(folder):
    model = open_model(str(folder), "cpu", "auto", "dummy", None, None, **AS_SERVED)
    assert model.step_limits(32) == (None, None)
    assert model.step_limits(2048) == (2048, None)
    assert model.step_limits(3000) == (3000, 3000)


def test_files_that_cannot_be_compared_are_one_line(tmp_path):
    for name, text in {"a.json": "{}", "b.json": "no"}.items():
        (tmp_path / name).write_text(text)
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    assert "a.json holds no results of tvr bench" in refused_here("bench", "compare", a, b)
    assert "b.json holds no results" in refused_here("bench", "compare", b, a)
    assert "cannot be read" in refused_here("bench", "compare", tmp_path / "c.json", a)


def test_sizes_may_go_together_and_tokens_be_drawn(bench, tmp_path):
    drawn = "greedy;temperature=0.8,top_p=0.95,seed=1"
    options = ("--sizes", "1x4+3, 2x8+2", "--sampling", drawn)
    done = bench("latency", *options, *ITERS, "--backend", "torch", "--json", tmp_path / "l.json")
    assert done.returncode == 0, done.stderr
    rows = rows_in(tmp_path / "l.json")
    sizes = [(row["batch"], row["input_len"], row["output_len"]) for row in rows]
    assert sizes == [(1, 4, 3)] * 2 + [(2, 8, 2)] * 2
    ways = ["greedy", "temperature=0.8, top_p=0.95, seed=1"]
    assert [row["sampling"] for row in rows] == ways * 2
    assert all(way in done.stdout for way in ways)
    assert all(row["ttft_ms"] > 0 and row["itl_ms"] > 0 for row in rows)


def test_sizes_beside_the_options_that_they_stand_for_are_refused(bench):
    done = bench("latency", "--sizes", "1x4+3", "--batch", "2")
    assert done.returncode == 2
    assert "--sizes says all; leave out --batch" in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--sizes", "1x4", "is not of the form BATCHxPROMPT+ANSWER"),
        ("--sizes", "1x4+1", "an answer"),
        ("--sampling", "temperature", "is not NAME=NUMBER"),
        ("--sampling", "heat=1", "has an unknown name; known: temperature, top_p"),
        ("--sampling", "max_tokens=1", "is the benchmark's own"),
        ("--sampling", "top_p=7", "top_p"),
    ],
)
def test_bad_sizes_and_sampling_are_refused_in_one_line(bench, option, value, says):
    done = bench("latency", option, value, *ITERS, "--backend", "torch")
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
