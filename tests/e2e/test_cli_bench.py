"""`tvr bench`: what it measures, prints and writes, and how it ends."""

from __future__ import annotations

import json

import pytest
import torch

from support.cli import refused_here, run_here
from support.plugins import install
from tvr.bench.session import Session

#: Serves `silu_mul` wrong, and `argmax` right.
FAULTY = """
from dataclasses import replace

from tvr.backends.torch_ref import plugin
from tvr.contract import BackendInfo
from tvr.hookspecs import hookimpl


@hookimpl
def tvr_backend_info():
    ops = plugin.tvr_backend_info().ops
    return BackendInfo(name="faulty", abi=(1, 0), ops={n: ops[n] for n in ("silu_mul", "argmax")})


@hookimpl
def tvr_bind_silu_mul(spec, device):
    right = plugin.tvr_bind_silu_mul(spec=spec, device=device)
    return replace(right, run=lambda x, *, out: right.run(x, out=out).mul_(1.25))


tvr_bind_argmax = plugin.tvr_bind_argmax
"""

ON_CPU = ("--device", "cpu")
ATTENTION = ("bench", "attention", *ON_CPU, "--backend", "torch", "--head-dim", "32")
SMALL = (*ATTENTION, "--num-heads", "4", "--num-kv-heads", "2", "--batch", "1,2", "--ctx", "24")


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory, monkeypatch):
    site = tmp_path_factory.mktemp("site")
    install(
        site,
        "tvr-faulty",
        entry_points={"faulty": "tvr_faulty"},
        sources={"tvr_faulty.py": FAULTY},
    )
    monkeypatch.syspath_prepend(site)


def test_attention_has_a_table_rows_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    files = tmp_path / "a.json", tmp_path / "a.png"
    done = run_here(*SMALL, "--json", files[0], "--plot", files[1])
    assert (done.returncode, done.stderr) == (0, "")
    decode, prefill = done.stdout.split("\n\n")[1:]
    assert decode.splitlines()[1].split() == ["batch", "torch", "us", "TB/s"]
    assert prefill.startswith("attention_prefill\n")
    data = json.loads(files[0].read_text())
    sizes = [(row["op"], row["batch"], row["ctx"]) for row in data["rows"]]
    decodes = [("attention_decode", batch, 24) for batch in (1, 2)]
    assert sizes == [*decodes, ("attention_prefill", 1, 24)]
    assert all(row["us"] > 0 and row["mode"] == "eager" for row in data["rows"])
    assert files[1].read_bytes().startswith(b"\x89PNG")


def test_one_decode_may_have_sequences_of_many_lengths(tmp_path):
    file = tmp_path / "a.json"
    sizes = ("--head-dim", "16", "--num-heads", "2", "--num-kv-heads", "1")
    done = run_here("bench", "attention", "--seq-lens", "40,3x7", *sizes, *ON_CPU, "--json", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 x 40 + 3 x 7" in done.stdout
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["op"], row["batch"], row["ctx"]) == ("attention_decode", 4, 40)
    assert row["seq_lens"] == "1 x 40 + 3 x 7"
    assert row["us"] > 0


def test_the_header_says_on_what_and_with_what(tmp_path):
    done = run_here(*SMALL, "--op", "decode", "--json", tmp_path / "a.json")
    header = json.loads((tmp_path / "a.json").read_text())["header"]
    assert (header["schema"], header["device"], header["interrupted"]) == (1, "cpu", False)
    assert header["versions"]["torch"] == torch.__version__
    assert header["backends"]["torch"]["distribution"] == "tvr"
    assert header["command"].startswith("tvr ")
    assert header["ceiling"]["copy_tb_s"] > 0
    assert header["ceiling"]["read_tb_s"] > 0
    assert f"read {header['ceiling']['read_tb_s']:.2f} TB/s" in done.stdout


def test_ops_compare_backends_and_a_wrong_one_ends_with_1(tmp_path):
    options = ("--op", "silu_mul,argmax", "--rows", "2", "--mb", "0", "--json", tmp_path / "o.json")
    done = run_here("bench", "ops", *ON_CPU, "--backend", "torch,faulty", *options)
    assert (done.returncode, done.stderr) == (1, "")
    assert "silu_mul of faulty: failed: out[0, 0] is " in done.stdout
    assert "torch/faulty" in done.stdout
    silu, wrong, *argmax = json.loads((tmp_path / "o.json").read_text())["rows"]
    assert (silu["us"] > 0, wrong["us"], "error" in wrong) == (True, None, True)
    assert [row["backend"] for row in argmax] == ["torch", "faulty"]
    assert all(row["us"] > 0 for row in argmax)


def test_what_a_backend_does_not_serve_is_skipped_and_said():
    options = ("--op", "rms_norm", "--rows", "1", "--mb", "0")
    done = run_here("bench", "ops", *ON_CPU, "--backend", "torch", "--backend", "faulty", *options)
    assert done.returncode == 0
    assert "rms_norm of faulty: skipped: does not implement rms_norm" in done.stdout
    alone = run_here("bench", "ops", *ON_CPU, "--backend", "faulty", *options)
    assert alone.returncode == 1  # nothing was measured


def test_an_interrupt_keeps_what_is_measured(tmp_path, monkeypatch):
    compare = Session.compare

    def interrupted(self, cells):
        yield next(compare(self, cells))
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "compare", interrupted)
    done = run_here(*SMALL, "--json", tmp_path / "a.json")
    assert done.returncode == 130
    assert done.stdout.endswith("interrupted: 2 of 3 cells were not measured\n")
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["header"]["interrupted"]
    assert len(data["rows"]) == 1


def test_the_table_is_printed_even_if_the_json_cannot_be_written_after_all():
    done = run_here(*SMALL, "--json", "/dev/full")
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert "attention_decode" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["attention", "ops"])
def test_without_a_gpu_one_line_says_how_to_measure_the_cpu(command):
    line = refused_here("bench", command)
    assert "sees no CUDA device; --device cpu times the CPU" in line


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["ops", "--device", "tpu"], "device 'tpu' is not known; use auto, cpu, cuda or cuda:N"),
        (["attention", "--op", "x"], "--op 'x' is not known; known: decode, prefill, both"),
        (["attention", "--head-dim", "64,"], "--head-dim '64,' is no list of whole numbers"),
        (["attention", "--batch", "0"], "--batch '0' is no list of whole numbers above 0"),
        (["attention", "--seq-lens", "9,2y8"], "--seq-lens '9,2y8': '2y8' is no length"),
        (["attention", "--seq-lens", "9,0"], "'0' is no length"),
        (["attention", "--seq-lens", "0x9"], "'0x9' is no length"),
        (["attention", "--seq-lens", "9", "--ctx", "9"], "leave out --batch, --ctx"),
        (["attention", "--num-heads", "33"], "33 query heads cannot be shared out"),
        (["attention", "--dtype", "int8"], "'int8' is not one of float32"),
        (["attention", "--op", "prefill", "--plot", "x.png"], "--op prefill measures none"),
        (["attention", "--plot", "x.txt"], "must end in one of .png"),
        (["attention", "--json", "nowhere/x.json"], "there is no folder nowhere"),
        (["attention", "--backend", "nothing"], "backend 'nothing' is not known; known: "),
        (["attention", "--device", "tpu"], "device 'tpu' is not known"),
        (["ops", "--op", "attention_decode"], "is not known here; known: rms_norm"),
        (["ops", "--rows", "many"], "--rows 'many' is no list"),
        (["ops", "--mb", "-1"], "--mb is -1"),
        (["ops", "--json", "."], "is a folder"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_ends_with_2(options, says):
    device = () if "--device" in options else ON_CPU
    assert says in refused_here("bench", *options, *device)


def test_without_matplotlib_one_line_says_what_to_do(monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name)
    )
    line = refused_here(*SMALL, "--plot", "x.png")
    assert "pip install 'tvr[plot]'" in line


def test_alone_it_prints_its_help():
    done = run_here("bench")
    assert done.returncode == 0
    assert "attention" in done.stdout
    assert "ops" in done.stdout
