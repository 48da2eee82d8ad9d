"""`tvr env` and `tvr models`: what there is on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import refused_here, run_here
from support.engines import save_shape
from support.fake_nvcc import fake_nvcc
from tvr.backends.pycuda_raw import nvcc as nvcc_module
from tvr.cli.env import without_paths


def test_env_says_versions_devices_compilers_and_backends():
    done = run_here("env")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(run_here("env", "--json").stdout)
    for name in ("python", "system", "package torch", "compiler nvcc", "cuda", "backend torch"):
        assert data[name]
        assert f"\n{name} " in f"\n{done.stdout}"
    assert data["backend torch"].startswith("ok from tvr ")
    for folder in (Path.home(), Path.cwd(), sys.prefix):
        assert f"{folder}/" not in done.stdout


def test_env_names_the_nvcc_that_the_backend_takes(tmp_path, monkeypatch):
    fake_nvcc(tmp_path / "cuda" / "bin", version="12.9")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert json.loads(run_here("env", "--json").stdout)["compiler nvcc"].startswith("12.9 (")
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(nvcc_module, "distributions", lambda **kwargs: [])
    found = json.loads(run_here("env", "--json").stdout)["compiler nvcc"]
    assert found.startswith("no usable nvcc: not on PATH; ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"no file {Path.home()}/alice/lib.so here", "no file .../lib.so here"),
        (f"in {json.__file__}:", "in .../json/__init__.py:"),
        ("cannot open /opt/alice/lib/libcuda.so.1: no", "cannot open .../libcuda.so.1: no"),
        ("'/srv/a/b.py', line 3", "'.../b.py', line 3"),
        (r"at C:\Users\alice\x.dll", "at .../x.dll"),
        ("see https://host/one/two or a/b/c", "see https://host/one/two or a/b/c"),
    ],
)
def test_no_folder_of_this_machine_is_printed(text, expected):
    assert without_paths(text) == expected


def test_env_works_where_the_plugin_configuration_does_not(tmp_path, monkeypatch):
    (tmp_path / "plugins.toml").write_text("order = 3")
    monkeypatch.setenv("TVR_PLUGINS", str(tmp_path / "plugins.toml"))
    done = run_here("env", "--json")
    assert done.returncode == 0
    found = json.loads(done.stdout)["backends"]
    assert "plugins.toml" in found
    assert str(tmp_path) not in found


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "no-cache"))


def test_models_are_listed_with_what_they_are_or_why_not(tmp_path, empty_cache, monkeypatch):
    good = save_shape(tmp_path / "a" / "good")
    cut = save_shape(tmp_path / "b" / "cut")
    shard = cut / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    (foreign / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (tmp_path / "empty").mkdir()
    data = json.loads(run_here("models", tmp_path, "--json").stdout)
    assert [row["name"] for row in data] == ["demo", str(good), str(cut), str(foreign)]
    assert [row["supported"] for row in data] == [True, True, False, False]
    demo, found, truncated, gpt2 = (row["detail"] for row in data)
    assert "3.8 M parameters" in demo
    assert "context 256" in found
    assert "truncated" in truncated
    assert "GPT2LMHeadModel" in gpt2
    monkeypatch.chdir(tmp_path)
    lines = run_here("models").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["model", "demo", *("a/good", "b/cut", "foreign")]


def test_every_listed_name_is_one_that_run_takes(tmp_path, empty_cache):
    data = json.loads(run_here("models", tmp_path, "--json").stdout)
    for row in data:
        assert run_here("run", "A", "--max-tokens", 2, "--model", row["name"]).returncode == 0


def test_models_wants_a_folder(tmp_path):
    assert "is no folder" in refused_here("models", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"_TVR_COMPLETE": "complete_bash", "COMP_WORDS": "tvr ru", "COMP_CWORD": "1"}, "run"),
        (
            {"_TVR_COMPLETE": "complete_fish", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
            | {"_TYPER_COMPLETE_ARGS": "tvr run --outp"},
            "--output",
        ),
    ],
)
def test_shells_complete_commands_and_options(variables, expected):
    done = subprocess.run(
        [sys.executable, "-m", "tvr"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split()[0] == expected
