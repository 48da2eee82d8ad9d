"""`tvr run --shadow` on real models: quiet about what is right, one line about what is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.cli import refused_here, run_here
from support.engines import greedy
from support.plugins import install, install_sample
from support.shadowed import OTHER_WAYS, backend_of, right
from tvr import LLM, demo
from tvr.conformance.shadow import Shadow
from tvr.contract import DTYPES, OPS

TEXTS = ["Once upon a time there was a king. " * 8, "ROMEO:", "To be, or not to be, that is"]

#: The sample that rotates, but for one element of layer 1 in step 2 and for good from then on.
ROTATES_WRONG = """
import tvr_only_rope as sample
from tvr.contract import BackendInfo, BoundOp, why_not
from tvr.hookspecs import hookimpl

INFO = BackendInfo(name="wrong_rope", abi=(1, 0), ops={"rope": [sample.BOX]})
calls = 0

@hookimpl
def tvr_backend_info():
    return INFO

@hookimpl
def tvr_bind_rope(spec, device):
    return None if why_not(INFO, spec, device) else BoundOp(run=rope)

def rope(q, k, positions, cos_sin_cache, *, q_out, k_out):
    global calls
    calls += 1
    result = sample.rope(q, k, positions, cos_sin_cache, q_out=q_out, k_out=k_out)
    if calls > FIRST:
        k_out[0, 1, 5] += 0.5
    return result
"""
NUM_LAYERS = 6


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on the path with the samples in it; the working directory is another."""
    site = tmp_path / "site"
    site.mkdir()
    install_sample(site, "tvr_only_rope")
    install(
        site,
        "tvr-wrong-rope",
        entry_points={"wrong_rope": "tvr_wrong_rope"},
        sources={
            "tvr_wrong_rope.py": ROTATES_WRONG.replace("FIRST", str(2 * NUM_LAYERS + 1)),
        },
    )
    monkeypatch.syspath_prepend(site)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return site


def last_line(done):
    return done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("site")
def test_a_right_backend_runs_to_the_end_and_the_calls_are_counted():
    plain = run_here("run", "ROMEO:", "--max-tokens", 6, "--backend", "only_rope")
    done = run_here(
        "run", "ROMEO:", "--max-tokens", 6, "--backend", "only_rope", "--shadow", "torch"
    )
    assert done.returncode == 0
    assert done.stdout == plain.stdout
    num_calls = 6 * NUM_LAYERS
    assert (
        last_line(done)
        == f"tvr: shadow: {num_calls} calls of 1 op agree with torch: rope {num_calls}"
    )
    assert os.listdir() == []


@pytest.mark.usefixtures("site")
def test_a_fault_ends_the_run_with_one_line_and_a_file():
    arguments = ("--max-tokens", 40, "--backend", "wrong_rope", "--shadow", "torch")
    done = run_here("run", "ROMEO:", *arguments)
    assert done.returncode == 1
    line = last_line(done)
    assert line.startswith(
        "tvr: rope of backend 'wrong_rope' at layers.1.self_attn, step 2: row 0 (sequence 0 of the "
        "step, position "
    )
    assert "): k_out[0, 1, 5] is " in line
    assert ", wanted " in line
    assert ", limit " in line
    file = "tvr-shadow-rope.safetensors"
    assert line.endswith(
        f"; kept in {file}; `tvr conformance --backend wrong_rope --replay {file}` runs it again"
    )
    assert os.listdir() == [file]
    assert done.stdout.endswith("\n")


@pytest.mark.usefixtures("site")
def test_a_kept_call_is_replayed_on_any_backend():
    """The wrong one is the module that ran, so it counts on and stays wrong."""
    run_here("run", "ROMEO:", "--backend", "wrong_rope", "--shadow", "torch")
    replay = ("--replay", "tvr-shadow-rope.safetensors")
    done = run_here("conformance", "--backend", "wrong_rope", *replay)
    assert done.returncode == 1, done
    found, verdict = done.stdout.splitlines()
    assert found.startswith(
        "tvr-shadow-rope.safetensors: rope of backend 'wrong_rope' at layers.1."
    )
    assert verdict.startswith("wrong_rope on cpu: it shows again: k_out[0, 1, 5] is ")
    done = run_here("conformance", "--backend", "only_rope", *replay)
    assert (done.returncode, done.stderr) == (0, "")
    verdict = done.stdout.splitlines()[-1]
    assert verdict == "only_rope on cpu: rope is right; the fault does not show again"
    assert "drop --op" in refused_here("conformance", "--backend", "torch", "--op", "rope", *replay)
    missing = refused_here("conformance", "--backend", "torch", "--replay", "nowhere.safetensors")
    assert "nowhere.safetensors cannot be read as the file of a shadow" in missing


@pytest.mark.usefixtures("site")
def test_a_batch_stops_at_the_first_fault(tmp_path):
    prompts, results = tmp_path / "prompts.txt", tmp_path / "results.jsonl"
    prompts.write_text("ROMEO:\nJULIET:\n" * 20)
    arguments = ("--backend", "wrong_rope", "--shadow", "torch", "--shadow-file", "x.safetensors")
    done = run_here("run", "--input", prompts, "--output", results, "--json", *arguments)
    assert done.returncode == 1
    assert "layers.1.self_attn, step 2" in last_line(done)
    assert "--replay x.safetensors" in last_line(done)
    assert results.read_text() == ""
    assert os.listdir() == ["x.safetensors"]


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--shadow", "torch"], "--shadow needs --backend NAME"),
        (["--shadow", "torch", "--backend", "torch"], "both 'torch'; name two backends"),
        (["--shadow", "nobody", "--backend", "only_rope"], "backend 'nobody' is not known"),
        (["--shadow", "torch", "--backend", "nobody"], "backend 'nobody' is not known"),
        (["--shadow-file", "x", "--backend", "only_rope"], "--shadow-file needs --shadow NAME"),
        (
            ["--shadow", "torch", "--shadow-file", "no/x", "--backend", "only_rope"],
            "there is no folder no",
        ),
        (["--shadow", "torch", "--shadow-file", ".", "--backend", "only_rope"], "is a folder"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments, reason):
    assert reason in refused_here("run", "ROMEO:", *arguments)


def serves_nothing(site: Path) -> None:
    source = ROTATES_WRONG.replace('"float32"', "")
    source = source.replace("sample.BOX", 'Box(dtypes=("float32",))').replace("wrong_rope", "idle")
    source = source.replace("BoundOp, why", "BoundOp, Box, why").replace("FIRST", "0")
    install(site, "tvr-idle", entry_points={"idle": "tvr_idle"}, sources={"tvr_idle.py": source})


def test_a_run_that_compared_nothing_is_an_error(site):
    """The backend is for CUDA alone, so that everything falls through to the reference."""
    serves_nothing(site)
    done = run_here("run", "ROMEO:", "--backend", "idle", "--shadow", "torch")
    assert done.returncode == 2
    assert "shadow 'torch' has nothing to compare with" in last_line(done)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", [dict.fromkeys(OPS, right), OTHER_WAYS], ids=["copy", "others"])
def test_right_backends_agree_on_the_demo_model(dtype, ops):
    agree(demo.path(), dtype, ops)


@pytest.mark.slow
@pytest.mark.skipif("TVR_SMOLLM2" not in os.environ, reason="TVR_SMOLLM2 names no model directory")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ops", [dict.fromkeys(OPS, right), OTHER_WAYS], ids=["copy", "others"])
def test_right_backends_agree_on_a_real_model(dtype, ops):
    agree(os.environ["TVR_SMOLLM2"], dtype, ops)


def agree(model, dtype, ops) -> None:
    shadow = Shadow()
    with LLM(model, plugins=[backend_of(ops)], dtype=dtype, shadow=shadow) as llm:
        llm.generate(TEXTS, greedy(8))
    compared = {op for _, op in shadow.calls}
    assert {"linear", "attention_prefill", "attention_decode", "silu_mul"} <= compared
    assert shadow.finding is None
