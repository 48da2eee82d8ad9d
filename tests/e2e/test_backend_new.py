"""`tvr backend new`: the package it writes installs, passes and serves; what it refuses."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import refused_here, run_here
from support.plugins import install
from support.scaffolds import install_scaffold
from tvr.contract import OPS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def files_of(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_it_writes_a_whole_package_and_says_what_comes_next(tmp_path):
    done = run_here("backend", "new", "fast", "--ops", "attention_decode,rope", "--dir", tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "tvr-fast"
    assert files_of(tmp_path) == {
        f"tvr-fast/{file}"
        for file in (
            "pyproject.toml",
            "README.md",
            ".gitignore",
            "bench.py",
            "tvr_fast/__init__.py",
            "tvr_fast/plugin.py",
            "tvr_fast/ops/__init__.py",
            "tvr_fast/ops/attention_decode.py",
            "tvr_fast/ops/rope.py",
            "tests/test_conformance.py",
        )
    }
    assert done.stdout.splitlines() == [
        f"wrote {folder}, which serves rope, attention_decode. Next:",
        f"  pip install -e '{folder}[test]'",
        "  tvr conformance --backend fast",
        '  tvr run "ROMEO:" --backend fast',
    ]


def test_names_with_dots_and_dashes_make_a_valid_package(tmp_path):
    assert run_here("backend", "new", "my-norm.v2", "--dir", tmp_path).returncode == 0
    project = tomllib.loads((tmp_path / "tvr-my-norm.v2" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "tvr-my-norm.v2"
    entry_points = project["project"]["entry-points"]["tvr.backends.v1"]
    assert entry_points == {"my-norm.v2": "tvr_my_norm_v2.plugin"}
    assert (tmp_path / "tvr-my-norm.v2" / "tvr_my_norm_v2" / "ops" / "rms_norm.py").is_file()


def test_all_stands_for_every_op_and_the_readme_names_the_file_of_each(tmp_path):
    done = run_here("backend", "new", "every", "--ops", "all", "--dir", tmp_path)
    assert f"which serves {', '.join(OPS)}. " in done.stdout
    readme = (tmp_path / "tvr-every" / "README.md").read_text()
    files = re.findall(r"^   - `(.+)`$", readme, re.MULTILINE)
    assert files == [f"tvr_every/ops/{op}.py" for op in OPS]
    assert all((tmp_path / "tvr-every" / file).is_file() for file in files)


def test_the_readme_of_one_op_names_its_file_and_no_other(tmp_path):
    run_here("backend", "new", "fast", "--ops", "rope", "--dir", tmp_path)
    readme = (tmp_path / "tvr-fast" / "README.md").read_text()
    assert re.findall(r"tvr_fast/ops/(\w+)\.py", readme) == ["rope", "OP"]


def test_an_op_brings_along_the_ops_it_calls(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    install_scaffold(tmp_path, "whole", ["rope_kv_write"])
    plugin = importlib.import_module("tvr_whole.plugin")
    assert list(plugin.INFO.ops) == ["rope_kv_write"]


def test_the_written_sources_keep_to_the_style_of_the_house(tmp_path):
    run_here("backend", "new", "every", "--ops", "all", "--dir", tmp_path)
    for command in (["format", "--check"], ["check", "--select", "E,F,W,B,UP,SIM,RUF,ANN"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--isolated", "--line-length", "100", "."],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["Fast"], "backend name 'Fast' is not valid; use lower-case letters"),
        (["2fast"], "backend name '2fast' is not valid"),
        (["fast-"], "ends in '-'; a package's name must end in a letter or digit"),
        (["auto"], "'auto' means the configured order; take another"),
        (["all"], "'all' means every op; take another"),
        (["engine"], "'engine' means the suite's model; take another"),
        (["a..b"], "'a..b' has two of '-', '_' and '.' in a row"),
        (["a-_b"], "'a-_b' has two of '-', '_' and '.' in a row"),
        (["fast", "--ops", "all,rope"], "'all' is not an op"),
        (["torch"], "backend 'torch' is installed already, by tvr"),
        (["triton"], "backend 'triton' is installed already, by tvr"),
        (["fast", "--ops", "softmax"], "'softmax' is not an op; ops: rms_norm, "),
        (["fast", "--ops", "rope,rope"], "op rope is given twice"),
        (["fast", "--ops", ""], "'' is not an op"),
        (["fast", "--ops", "rope,"], "'' is not an op"),
        ([], "Missing argument 'NAME'"),
    ],
)
def test_what_it_cannot_write_is_refused_in_a_line(arguments, reason, tmp_path):
    assert reason in refused_here("backend", "new", *arguments, "--dir", tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_name_of_an_installed_backend_or_package_is_refused(tmp_path, monkeypatch):
    site, work = tmp_path / "site", tmp_path / "work"
    work.mkdir()
    install(site, "other", entry_points={"taken": "other"}, sources={"tvr_used/__init__.py": ""})
    monkeypatch.syspath_prepend(site)
    line = refused_here("backend", "new", "taken", "--dir", work)
    assert "backend 'taken' is installed already, by other 1.0 (other)" in line
    line = refused_here("backend", "new", "used", "--dir", work)
    assert "a Python package tvr_used is installed already" in line
    install(site, "tvr-my_norm", entry_points={"other": "other"}, sources={})
    line = refused_here("backend", "new", "my-norm", "--dir", work)
    assert "a package tvr-my_norm is installed already; take another name than 'my-norm'" in line
    assert not list(work.iterdir())


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path):
    (tmp_path / "tvr-fast").mkdir()
    line = refused_here("backend", "new", "fast", "--dir", tmp_path)
    assert f"{tmp_path / 'tvr-fast'} exists; take another name or --dir" in line
    assert files_of(tmp_path) == set()
    line = refused_here("backend", "new", "fast", "--dir", tmp_path / "nowhere")
    assert "nowhere is not a folder; make it first" in line


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    write_text, written = Path.write_text, []

    def write_four_files(path, *args, **kwargs):
        written.append(path)
        if len(written) > 4:
            raise OSError(28, "No space left on device")
        return write_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", write_four_files)
    assert "No space left on device" in refused_here("backend", "new", "fast", "--dir", tmp_path)
    assert len(written) == 5
    assert not list(tmp_path.iterdir())


def test_backend_alone_shows_its_help():
    done = run_here("backend")
    assert done.returncode == 0
    assert "new" in done.stdout


def test_all_ops_of_a_new_package_serve_a_model_with_the_tokens_of_the_reference(
    tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    install_scaffold(tmp_path, "whole-model", OPS)
    answers = {}
    for backend in ("whole-model", "torch"):
        options = ("--dtype", "float32", "--temperature", 0, "--max-tokens", 24, "--strict")
        done = run_here("run", "ROMEO:", "--backend", backend, *options)
        assert done.returncode == 0, done.stderr
        answers[backend] = done.stdout
    assert len(answers["torch"]) > 24
    assert answers["whole-model"] == answers["torch"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A new package as pip installs it: its sources, and the folder that it is installed into."""
    parent, site = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("site")
    done = run_here("backend", "new", "piped", "--dir", parent)
    assert done.returncode == 0, done.stderr
    folder = parent / "tvr-piped"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)]
    done = subprocess.run(
        [*pip, str(folder)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder, site


def run_with(installed, *command: str) -> subprocess.CompletedProcess[str]:
    """Run python in the package's folder, with what pip installed on the path."""
    folder, site = installed
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *command],
        # PYTHONSAFEPATH: import what was installed, not what lies in the current folder.
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_pip_installs_it_and_tvr_sees_it(installed):
    done = run_with(installed, "-m", "tvr", "backends")
    row = next(line for line in done.stdout.splitlines() if line.startswith("piped "))
    assert "tvr-piped 0.1.0" in row
    assert row.endswith("rms_norm")


def test_it_passes_the_conformance_suite_at_once(installed):
    done = run_with(installed, "-m", "tvr", "conformance", "--backend", "piped")
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_own_tests_pass(installed):
    done = run_with(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout.splitlines()[-1]


def test_it_serves_a_model(installed):
    done = run_with(installed, "-m", "tvr", "run", "ROMEO:", "--backend", "piped", "--stats")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "piped" in done.stderr


def test_its_benchmark_times_both_backends(installed):
    done = run_with(installed, "bench.py")
    assert done.returncode == 0, done.stderr
    times = {line.split()[0] for line in done.stdout.splitlines() if " us " in line}
    assert times == {"piped", "torch"}
