"""`tvr kernels`: compile ahead, list, clean; with a compiler that needs no CUDA."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from support.cli import refused_here, run_here
from support.fake_nvcc import fake_nvcc, ptxas_log, runs
from tvr.backends.pycuda_raw import nvcc as nvcc_module
from tvr.backends.pycuda_raw.compile import SOURCE_DIR
from tvr.cli.app import app, run_app

BUILD = ("kernels", "build", "--arch", "sm_80", "--dtype", "bfloat16", "--head-dim", "64")


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A folder with a cache of its own and an nvcc in `bin`, the only one there is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    for name in ("CUDA_HOME", "CUDA_PATH", "TVR_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(nvcc_module, "distributions", lambda **kwargs: [])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cached(machine: Path) -> list[str]:
    return sorted(file.name for file in (machine / "cache" / "tvr" / "kernels").glob("*.cubin"))


def test_build_compiles_each_kernel_once_and_says_what_they_take(machine):
    nvcc = fake_nvcc(machine / "bin", log=ptxas_log(90))
    done = run_here(*BUILD, "--jobs", 3)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert len(lines) == len(runs(nvcc)) == len(cached(machine)) > 10
    total = len(lines)
    assert any(
        re.fullmatch(rf"\[\d+/{total}\] rope_bf16_h64 sm_80: 90 .* s", line) for line in lines
    )
    assert re.fullmatch(
        rf"{total} kernels in \d+\.\d s, 0 of them in the cache; at most 90 registers "
        r"\(\w+ sm_80[^)]*\); none spills",
        last,
    )
    again = run_here(*BUILD)
    assert f"{total} of them in the cache" in again.stdout.splitlines()[-1]
    assert len(runs(nvcc)) == total
    assert run_here(*BUILD, "--force").returncode == 0
    assert len(runs(nvcc)) == 2 * total


def test_every_failure_is_listed_and_the_rest_is_built(machine):
    fails = """case "$source" in *rms_norm.cu)
        echo "$source(7): error: no such luck"; exit 2 ;; esac"""
    nvcc = fake_nvcc(machine / "bin", body=fails)
    done = run_here(*BUILD)
    assert done.returncode == 1
    failed = [line for line in done.stderr.splitlines() if line.startswith("tvr: error: ")]
    assert len(failed) == 2
    for name in ("rms_norm", "add_rms_norm"):
        (line,) = (line for line in failed if f" {name}.cu:7: error: no such luck; " in line)
        assert f" {name}_bf16 sm_80 from {name}.cu was compiled by: {machine}/bin/nvcc " in line
    assert done.stderr.count("(7): error: no such luck") == 2  # the logs
    assert len(cached(machine)) == len(runs(nvcc)) - 2
    assert "; 2 failed; " in done.stdout.splitlines()[-1]


def test_what_fails_of_one_and_the_same_is_told_once(machine):
    fake_nvcc(machine / "bin")
    (machine / "cache").write_text("in the way")
    done = run_here(*BUILD)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.match(r"tvr: error: \d\d kernels: compiled kernels cannot be kept in /.*; set ", line)


def test_a_mistake_in_a_header_is_told_once_and_one_of_a_kernel_beside_it(machine):
    header = SOURCE_DIR / "common.cuh"
    fails = f"""echo "{header}(3): error: odd"; echo "  excerpt"
        case "$source" in *rope.cu) echo "$source(7): error: no such luck" ;; esac
        echo "1 error detected in the compilation of \\"$source\\"."; exit 2"""
    nvcc = fake_nvcc(machine / "bin", body=fails)
    done = run_here(*BUILD)
    assert done.returncode == 1
    headline, *told = done.stderr.splitlines()
    assert headline.startswith(f"tvr: error: {len(runs(nvcc))} kernels: common.cuh:3: error: odd; ")
    assert told == [
        f"{header}(3): error: odd",
        "  excerpt",
        f"{SOURCE_DIR}/rope.cu(7): error: no such luck",
    ]


SPILL = """case "$source" in *{source}.cu)
    cat "$source" > "$out"; tell '{log}'; exit ;; esac"""


@pytest.mark.parametrize(("source", "is_decode"), [("fd_split", True), ("rope", False)])
def test_spills_are_warned_of_and_those_of_decode_can_fail_a_build(source, is_decode, machine):
    (machine / "spilled").write_text(ptxas_log(255, stores=48, loads=24))
    fake_nvcc(machine / "bin", body=SPILL.format(source=source, log=machine / "spilled"))
    done = run_here(*BUILD)
    assert done.returncode == 0
    kind = "decode kernel " if is_decode else ""
    for line in done.stderr.splitlines():
        assert line.startswith(f"tvr: warning: {kind}{source}_bf16_h64 sm_80")
        assert line.endswith(" spills: 48 bytes written, 24 read")
    assert " spill" in done.stdout.splitlines()[-1]
    # Also where the cache has them all.
    again = run_here(*BUILD, "--check-spills")
    assert again.returncode == (1 if is_decode else 0)
    assert again.stderr == done.stderr != ""


def test_the_compilers_warnings_are_shown_once_each(machine):
    fake_nvcc(machine / "bin", log="x.cuh(2): warning #1-D: odd\n" + ptxas_log())
    assert run_here(*BUILD).stderr == "tvr: warning: x.cuh(2): warning #1-D: odd\n"


def test_without_arch_it_builds_for_the_usual_gpus_or_those_here(machine, monkeypatch):
    import torch

    fake_nvcc(machine / "bin")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_here(*BUILD[:2], *BUILD[4:]).returncode == 0
    assert {re.search(r"sm_\d+", name)[0] for name in cached(machine)} == {
        "sm_80",
        "sm_90",
        "sm_120",
    }
    run_here("kernels", "clean")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((9, 0), (7, 5))[index])
    assert run_here(*BUILD[:2], *BUILD[4:]).returncode == 0
    assert {re.search(r"sm_\d+", name)[0] for name in cached(machine)} == {"sm_90"}


def test_list_shows_what_is_in_the_cache_and_clean_removes_it(machine):
    fake_nvcc(machine / "bin", log=ptxas_log(90, stores=4, loads=8))
    assert run_here("kernels", "list").stdout.startswith("0 kernels, 0.0 kB, in ")
    run_here(*BUILD)
    lines = run_here("kernels", "list").stdout.splitlines()
    assert lines[0].split()[:7] == "kernel arch registers shared spills size age".split()  # noqa: SIM905
    assert len(lines) == len(cached(machine)) + 2
    (row,) = (line.split() for line in lines if line.startswith("rope_bf16_h64 "))
    assert row[1:5] == ["sm_80", "90", "512", "12"]
    assert row[6] == "kB"
    folder = machine / "cache" / "tvr" / "kernels"
    assert lines[-1].startswith(f"{len(cached(machine))} kernels, ")
    assert lines[-1].endswith(f" in {folder}")
    done = run_here("kernels", "clean")
    assert re.fullmatch(
        rf"removed {len(lines) - 2} kernels, [\d.]+ kB, from {folder}\n", done.stdout
    )
    assert not folder.exists()


def test_the_cache_is_the_one_of_the_backends_options(machine):
    (machine / "mine.toml").write_text(f'[options.pycuda]\ncache_dir = "{machine}/mine"\n')
    fake_nvcc(machine / "bin")
    assert run_here(*BUILD, "--plugins", "mine.toml").returncode == 0
    assert list((machine / "mine").glob("*.cubin"))
    assert cached(machine) == []
    listed = run_here("kernels", "list", "--plugins", "mine.toml").stdout
    assert listed.splitlines()[-1].endswith(f" in {machine}/mine")
    (machine / "mine.toml").write_text("[options.pycuda]\ncache_dir = 3\n")
    assert "cache_dir is 3" in refused_here("kernels", "list", "--plugins", "mine.toml")


def test_without_a_compiler_it_says_where_it_looked(machine, monkeypatch):
    monkeypatch.setenv("PATH", str(machine))
    line = refused_here(*BUILD)
    assert "no usable nvcc: not on PATH; not in CUDA_HOME (not set)" in line


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--arch", "sm_9x"), "--arch 'sm_9x' is no architecture as in sm_90"),
        (("--arch", "sm_80,90"), "--arch '90' is no architecture"),
        (("--arch", "sm_90a"), "--arch sm_90a: write sm_90, the GPU; kernels that need sm_90a are"),
        (("--arch", "sm_100f"), "--arch sm_100f: write sm_100, the GPU"),
        (("--arch", "sm_75"), "the kernels need sm_80 or newer"),
        (("--arch", "sm_86"), "does not compile for sm_86; it does for sm_80, sm_90, sm_120"),
        (("--dtype", "bf16"), "--dtype 'bf16' is not known; known: float32, float16, bfloat16"),
        (("--head-dim", "72"), "--head-dim '72' is not known; known: 64, 80, 96, 128, 256"),
        (("--jobs", "0"), "--jobs"),
    ],
)
def test_a_wrong_option_is_one_line(options, expected, machine):
    fake_nvcc(machine / "bin")
    assert expected in refused_here("kernels", "build", *options)
    assert cached(machine) == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_a_bar_instead_of_lines(machine, monkeypatch):
    fake_nvcc(machine / "bin")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    with redirect_stderr(Terminal()) as terminal, redirect_stdout(io.StringIO()) as stdout:
        assert run_app(app, list(BUILD)) == 0
    (line,) = stdout.getvalue().splitlines()
    total = line.split()[0]
    assert f"{total}/{total}" in terminal.getvalue()


def test_without_a_command_it_shows_what_there_is():
    shown = run_here("kernels").stdout
    assert all(name in shown for name in ("build", "list", "clean"))
