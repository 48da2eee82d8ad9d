"""The Triton backend from the command line: in the interpreter it is right, without it it says so.

Kernels are made for the interpreter or for a GPU when they are imported, so whatever interprets is
a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from support.cli import refused_here, run_here
from tvr.contract import OPS

SET_IT = "triton' cannot be used: on a CPU it runs under Triton's interpreter only: set "
SET_IT += "TRITON_INTERPRET=1"


@pytest.fixture(autouse=True)
def cpu_without_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("TVR_PLUGINS", raising=False)


def interpreted(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "tvr", *map(str, args)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def served_by(explained: str) -> dict[str, str]:
    """Return who serves each op, from `tvr backends --explain`."""
    return dict(re.findall(r"^(\w+): (\w+)$", explained, re.M))


def test_without_a_gpu_and_the_interpreter_it_refuses_in_one_line():
    assert SET_IT in refused_here("run", "ROMEO:", "--backend", "triton", "--device", "cpu")
    assert SET_IT in refused_here("conformance", "--backend", "triton", "--device", "cpu")
    assert SET_IT in refused_here("backends", "--backend", "triton", "--device", "cpu")


def test_without_them_other_backends_serve_and_it_is_listed_with_the_reason():
    done = run_here("backends", "--explain", "--device", "cpu")
    assert done.returncode == 0
    assert re.search(r"^triton +unavailable +tvr ", done.stdout, re.M)
    assert "triton: on a CPU it runs under Triton's interpreter only" in done.stdout
    assert set(served_by(done.stdout).values()) == {"torch"}
    env = json.loads(run_here("env", "--json").stdout)
    assert env["backend triton"].startswith("unavailable from tvr ")
    assert env["package triton"][0].isdigit()


def test_under_the_interpreter_it_serves_what_the_others_do_not():
    done = interpreted("backends", "--explain", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^triton +ok +tvr ", done.stdout, re.M)
    served = served_by(done.stdout)
    assert set(served) == set(OPS)
    # `tvr backends` asks for products of any number of rows, and this one is for few.
    assert {op for op, backend in served.items() if backend != "triton"} == {"linear"}
    assert "takes at most 8 rows, asked for any" in done.stdout
    assert json.loads(interpreted("env", "--json").stdout)["backend triton"].startswith("ok ")


def test_bfloat16_falls_through_with_the_reason():
    done = interpreted("backends", "--explain", "--device", "cpu", "--dtype", "bfloat16")
    assert done.returncode == 0
    assert set(served_by(done.stdout).values()) == {"torch"}
    assert done.stdout.count("dtype bfloat16 is not among float32, float16") == len(OPS)


@pytest.mark.slow
def test_a_model_makes_the_tokens_of_the_reference():
    options = ("ROMEO:", "--max-tokens", "4", "--temperature", "0", "--device", "cpu")
    done = interpreted("run", *options, "--backend", "triton")
    assert done.returncode == 0, done.stderr
    assert done.stdout == run_here("run", *options, "--backend", "torch").stdout
    assert "linear: takes at most 8 rows" in done.stderr  # and nothing else went to another
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--op", ",".join(op for op in OPS if "attention" not in op)], id="rows"),
        # All checks of attention take minutes; .ci/run has them.
        pytest.param(
            ["--op", "attention_decode,attention_prefill", "--check", "output_matches_oracle"],
            id="attention",
        ),
    ],
)
def test_the_kernels_pass_the_suite_in_the_interpreter(options):
    done = interpreted("conformance", "--backend", "triton", "--device", "cpu", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^passed: .* \d\d+ passed, 0 failed", done.stdout, re.M)
