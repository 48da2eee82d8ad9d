"""The example packages, installed from their metadata alone: seen, right, and used by a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.plugins import EXAMPLES, install_example


def python(site, *args, expected=0):
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *args],
        env={**os.environ, "PYTHONPATH": path},
        cwd=site,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = tmp_path_factory.mktemp("site").resolve()
    install_example(site, "tvr_sdpa")
    install_example(site, "tvr_flashinfer")
    return site


def test_both_are_listed_and_the_one_for_cuda_says_why_it_cannot_run_here(site):
    rows = json.loads(python(site, "tvr", "backends", "--json", "--device", "cpu").stdout)
    rows = {row["name"]: row for row in rows["backends"]}
    assert rows["sdpa"]["status"] == "not listed"
    assert rows["sdpa"]["ops"] == ["attention_decode", "attention_prefill"]
    assert rows["flashinfer"]["status"] == "unavailable"
    assert rows["flashinfer"]["reasons"] == ["needs a CUDA device, not cpu"]


def test_sdpa_keeps_every_claim_of_the_contract(site):
    python(site, "tvr", "conformance", "--backend", "sdpa", "--max-examples", "0")


def test_a_model_runs_on_sdpa_and_says_the_same(site):
    command = ["tvr", "run", "ROMEO:", "--max-tokens", "16", "--temperature", "0"]
    command += ["--device", "cpu", "--stats"]
    found = python(site, *command, "--backend", "sdpa")
    wanted = python(site, *command, "--backend", "torch")
    assert found.stdout == wanted.stdout
    for op in ("attention_decode", "attention_prefill"):
        assert f"op {op} sdpa" in " ".join(found.stderr.split())


def test_flashinfer_is_handed_what_it_can_take(site):
    tests = EXAMPLES / "tvr-flashinfer" / "tests"
    python(
        site, "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={EXAMPLES.parent}", str(tests)
    )
