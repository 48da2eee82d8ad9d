"""Compiling CUDA sources: what is compiled again and when, what fails and how it says so."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support.fake_nvcc import fake_nvcc, ptxas_log, runs
from tvr.backends.pycuda_raw.cache import KernelCache, configured_cache_dir, default_cache_dir
from tvr.backends.pycuda_raw.compile import Compiler
from tvr.backends.pycuda_raw.nvcc import find_nvcc
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.cli.kernels_text import kernel_table
from tvr.errors import CompileError, ConfigError, KernelError

SCALE = KernelVariant(source="scale", dtype="float32")


@pytest.fixture
def sources(tmp_path) -> Path:
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "scale.cu").write_text('#include "rows.cuh"\n// scale\n')
    (folder / "rows.cuh").write_text('  #  include "common.cuh"\n')
    (folder / "common.cuh").write_text(
        '#include "rows.cuh"\n#include "left_out.cuh"\n#include <tiles.cuh>\n#include <cstdint>\n'
    )
    (folder / "tiles.cuh").write_text("// tiles\n")
    return folder


def compiler(nvcc: Path, sources: Path, **settings) -> Compiler:
    found = find_nvcc({"PATH": str(nvcc.parent)}, [])
    return Compiler(found, sources.parent / "cache", sources, **settings)


def cached_names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_kernel_is_compiled_once_and_named_for_people(tmp_path, sources):
    nvcc = fake_nvcc(tmp_path / "bin", log=ptxas_log(77, stack=16, stores=8, loads=12))
    first, was_there = compiler(nvcc, sources).compile(SCALE, 90)
    assert not was_there
    assert first.cubin.name == f"scale_fp32-sm_90-{first.key[:16]}.cubin"
    assert (first.resources.registers, first.resources.spill_bytes) == (77, 20)
    assert compiler(nvcc, sources).compile(SCALE, 90) == (first, True)
    assert len(runs(nvcc)) == 1
    assert cached_names(first.cubin.parent) == [first.cubin.name, first.cubin.stem + ".json"]


@pytest.mark.parametrize(
    "changed",
    [
        "scale.cu",
        "rows.cuh",
        "common.cuh",  # included by a header
        "tiles.cuh",  # in angle brackets
        "left_out.cuh",  # new
    ],
)
def test_an_edited_source_or_header_is_compiled_again_and_back_it_is_not(
    changed, tmp_path, sources
):
    file = sources / changed
    nvcc = fake_nvcc(tmp_path / "bin")
    first, _ = compiler(nvcc, sources).compile(SCALE, 90)
    before = file.read_text() if file.exists() else None
    file.write_text(f"{before or ''}// edited\n")
    second, was_there = compiler(nvcc, sources).compile(SCALE, 90)
    assert not was_there
    assert second.cubin != first.cubin
    if before is None:
        file.unlink()
    else:
        file.write_text(before)
    assert compiler(nvcc, sources).compile(SCALE, 90) == (first, True)


@pytest.mark.parametrize(
    "variant",
    [
        KernelVariant(source="scale", dtype="float16"),
        KernelVariant(source="scale", dtype="float32", head_dim=64),
        KernelVariant(source="scale", dtype="float32", defines=(("STAGES", 3),)),
        KernelVariant(source="scale", dtype="float32", arch_specific=True),
    ],
)
def test_another_constant_or_architecture_is_another_kernel(variant, tmp_path, sources):
    nvcc = fake_nvcc(tmp_path / "bin")
    first, _ = compiler(nvcc, sources).compile(SCALE, 90)
    other, was_there = compiler(nvcc, sources).compile(variant, 90)
    assert not was_there
    assert other.cubin != first.cubin
    assert f"-arch={variant.arch(90)} " in runs(nvcc)[1]
    assert set(variant.flags) <= set(runs(nvcc)[1].split())


def test_another_compiler_or_its_flags_in_the_environment_compile_again(
    tmp_path, sources, monkeypatch
):
    old, new = fake_nvcc(tmp_path / "a"), fake_nvcc(tmp_path / "b", version="13.1")
    compiler(old, sources).compile(SCALE, 90)
    assert not compiler(new, sources).compile(SCALE, 90)[1]
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    assert not compiler(new, sources).compile(SCALE, 90)[1]
    monkeypatch.delenv("NVCC_APPEND_FLAGS")
    assert compiler(old, sources).compile(SCALE, 90)[1]


def test_a_source_outside_the_package_and_its_copy_share_the_cache(tmp_path, sources):
    nvcc = fake_nvcc(tmp_path / "bin")
    first, _ = compiler(nvcc, sources).compile(SCALE, 90)
    copy = shutil.copytree(sources, tmp_path / "copy")
    assert compiler(nvcc, copy).compile(SCALE, 90) == (first, True)


@pytest.mark.parametrize("damage", ["empty", "cut short", "no record", "broken record"])
def test_a_damaged_entry_is_compiled_again(damage, tmp_path, sources):
    nvcc = fake_nvcc(tmp_path / "bin")
    kernel, _ = compiler(nvcc, sources).compile(SCALE, 90)
    whole, record = kernel.cubin.read_bytes(), kernel.cubin.with_suffix(".json")
    if damage == "no record":
        record.unlink()
    elif damage == "broken record":
        record.write_text('{"sha256"')
    else:
        kernel.cubin.write_bytes(b"" if damage == "empty" else whole[:-1])
    again, was_there = compiler(nvcc, sources).compile(SCALE, 90)
    assert not was_there
    assert again.cubin.read_bytes() == whole
    assert compiler(nvcc, sources).compile(SCALE, 90)[1]


def test_force_compiles_what_is_there(tmp_path, sources):
    nvcc = fake_nvcc(tmp_path / "bin")
    compiler(nvcc, sources).compile(SCALE, 90)
    assert not compiler(nvcc, sources).compile(SCALE, 90, force=True)[1]
    assert len(runs(nvcc)) == 2


def test_a_source_saved_while_it_is_compiled_is_compiled_again(tmp_path, sources):
    """The old text's key would else name the new text's kernel, and editing back would load it."""
    save = f"[ -e '{tmp_path}/saved' ] || {{ touch '{tmp_path}/saved'; echo '// new' >> $source; }}"
    nvcc = fake_nvcc(tmp_path / "bin", body=save)
    old = (sources / "scale.cu").read_text()
    kernel, _ = compiler(nvcc, sources).compile(SCALE, 90)
    assert len(runs(nvcc)) == 2
    assert kernel.cubin.read_text() == (sources / "scale.cu").read_text() == f"{old}// new\n"
    assert len(KernelCache(kernel.cubin.parent).kernels()) == 1


COMPILE = """
import sys
from pathlib import Path
from tvr.backends.pycuda_raw.compile import compile_variant
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.cli.kernels_text import kernel_table
cache, sources = map(Path, sys.argv[1:])
variant = KernelVariant(source="scale", dtype="float32")
print(compile_variant(variant, 90, cache_dir=cache, source_dir=sources))
"""


def start(nvcc: Path, sources: Path) -> subprocess.Popen:
    """Start a process that compiles the kernel with the nvcc on its PATH."""
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE, str(sources.parent / "cache"), str(sources)],
        env={**os.environ, "PATH": f"{nvcc.parent}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds=30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def test_two_processes_that_compile_at_once_both_get_a_whole_kernel(tmp_path, sources):
    # Each compiler waits until both have begun, then writes the first half, and later the rest.
    body = f"""\
        while [ "$(wc -l < '{tmp_path}/bin/runs')" -lt 2 ]; do sleep 0.01; done
        printf half > "$out"; sleep 0.2"""
    nvcc = fake_nvcc(tmp_path / "bin", body=body)
    whole = (sources / "scale.cu").read_bytes()
    both = [start(nvcc, sources) for _ in range(2)]
    cache = tmp_path / "cache"
    while any(process.poll() is None for process in both):
        assert all(file.read_bytes() == whole for file in cache.glob("*.cubin"))
        time.sleep(0.005)
    results = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert len({out for out, _ in results}) == 1
    assert Path(results[0][0].strip()).read_bytes() == whole
    assert len(runs(nvcc)) == 2
    assert len(cached_names(cache)) == 2


def test_an_interrupted_compilation_leaves_no_file_and_no_process(tmp_path, sources):
    nvcc = fake_nvcc(
        tmp_path / "bin", body=f"printf half > $out; sleep 300 & echo $! > '{tmp_path}/pid'; wait"
    )
    process = start(nvcc, sources)
    pid_file = tmp_path / "pid"
    wait_for(lambda: pid_file.exists() and pid_file.read_text().strip())
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in stderr
    assert cached_names(tmp_path / "cache") == []
    wait_for(lambda: not is_running(int(pid_file.read_text())))


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended and not been waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def failure(nvcc: Path, sources: Path, **settings) -> CompileError:
    with pytest.raises(CompileError) as caught:
        compiler(nvcc, sources, **settings).compile(SCALE, 90)
    assert cached_names(sources.parent / "cache") == []
    assert "\n" not in str(caught.value)
    return caught.value


def test_an_error_names_file_line_and_command(tmp_path, sources):
    printed = f'{sources}/rows.cuh(41): error: identifier "zz" is undefined'
    nvcc = fake_nvcc(tmp_path / "bin", body=f"echo '{printed}'; exit 2")
    error = failure(nvcc, sources)
    assert error.found == 'rows.cuh:41: error: identifier "zz" is undefined'
    assert str(error).startswith(
        f"{error.found}; scale_fp32 sm_90 from scale.cu was compiled by: {nvcc} -cubin "
    )
    assert error.command == str(error).partition("compiled by: ")[2]
    assert error.command.endswith(f"{sources}/scale.cu -o scale_fp32.cubin")
    assert error.log == f"{printed}\n"
    assert error.source == "scale.cu"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("kill -9 $$", "nvcc was ended by signal 9 (Killed)"),
        ("exit 3", "nvcc ended with exit code 3 and no error"),
        ("exit 0", "nvcc ended well, but left no cubin"),
        ("echo 'nvcc error   : cicc died due to signal 9'; exit 9", "nvcc error : cicc died"),
    ],
)
def test_a_compiler_that_ends_without_a_result_says_how(body, expected, tmp_path, sources):
    error = str(failure(fake_nvcc(tmp_path / "bin", body=body), sources))
    assert error.startswith(expected)
    assert "; scale_fp32 sm_90 from scale.cu was compiled by: " in error


def test_a_kernel_without_known_resources_is_refused(tmp_path, sources):
    """Its spills would else count as none."""
    assert "ptxas -v" in str(failure(fake_nvcc(tmp_path / "bin", log="fine\n"), sources))


def test_a_compiler_that_hangs_is_ended(tmp_path, sources):
    nvcc = fake_nvcc(tmp_path / "bin", body="sleep 300 & wait")
    error = failure(nvcc, sources, timeout_s=0.3)
    assert error.found == "nvcc gave no answer in 0 s"


@pytest.mark.parametrize("variable", ["NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"])
def test_a_failure_tells_of_flags_in_the_environment(variable, tmp_path, sources, monkeypatch):
    monkeypatch.setenv(variable, "--nonsense")
    nvcc = fake_nvcc(tmp_path / "bin", body="echo 'nvcc fatal   : Unknown option'; exit 1")
    error = failure(nvcc, sources)
    assert error.found == f"nvcc fatal : Unknown option; {variable}=--nonsense is set"


def test_an_architecture_that_the_compiler_does_not_know_is_refused(tmp_path, sources):
    nvcc = fake_nvcc(tmp_path / "bin")
    with pytest.raises(KernelError, match=r"does not compile for sm_86; .* sm_80, sm_90, sm_120"):
        compiler(nvcc, sources).compile(SCALE, 86)


def test_a_missing_source_is_named(tmp_path, sources):
    nvcc = fake_nvcc(tmp_path / "bin")
    with pytest.raises(KernelError, match=r"no kernel source .*nothing\.cu"):
        compiler(nvcc, sources).compile(KernelVariant(source="nothing", dtype="float32"), 90)


def test_a_source_that_cannot_be_read_is_named(tmp_path, sources):
    """It was an error without a type, and the other kernels of a build were not compiled."""
    (sources / "folder.cu").mkdir()
    nvcc = fake_nvcc(tmp_path / "bin")
    with pytest.raises(KernelError, match=r"source .*/folder\.cu cannot be read: Is a directory$"):
        compiler(nvcc, sources).compile(KernelVariant(source="folder", dtype="float32"), 90)


@pytest.mark.parametrize("included", [".", "tiles.cuh/x"])
def test_an_include_that_is_no_file_is_the_compilers_to_refuse(included, tmp_path, sources):
    (sources / "scale.cu").write_text(f'#include "{included}"\n')
    printed = f"{sources}/scale.cu:1:10: fatal error: {included}: no such file"
    nvcc = fake_nvcc(tmp_path / "bin", body=f"echo '{printed}'; exit 1")
    assert failure(nvcc, sources).found == f"scale.cu:1: error: {included}: no such file"


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path, sources):
    nvcc = fake_nvcc(tmp_path / "bin")
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(KernelError, match=r"cannot be kept in .*cache: .*XDG_CACHE_HOME"):
        compiler(nvcc, sources).compile(SCALE, 90)


def test_the_cache_is_where_xdg_says(tmp_path, monkeypatch):
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/tvr/kernels")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir({"XDG_CACHE_HOME": "no/path"}) == tmp_path / ".cache/tvr/kernels"

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        default_cache_dir({})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cachedir": "x"}, "has cachedir; allowed: cache_dir"),
        ({"cache_dir": 5}, "cache_dir is 5; it must be a path"),
        ({"cache_dir": ""}, "cache_dir is ''; it must be a path"),
        ({"cache_dir": "~nobody-here/x"}, "cache_dir is '~nobody-here/x', and there is no such"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=re.escape(f"[options.pycuda] {message}")):
        configured_cache_dir(options)


def test_clean_removes_its_own_files_and_no_other(tmp_path, sources):
    nvcc = fake_nvcc(tmp_path / "bin")
    first = compiler(nvcc, sources)
    kernel, _ = first.compile(SCALE, 90)
    folder = kernel.cubin.parent
    strange = [folder / "notes.txt", folder / "mine.cubin", folder / "scale-sm_90-12.json"]
    for file in strange:
        file.write_text("mine")
    expected = kernel.cubin.stat().st_size + kernel.cubin.with_suffix(".json").stat().st_size
    assert KernelCache(folder).clean() == (1, expected)
    assert set(folder.iterdir()) == set(strange)
    assert KernelCache(folder).clean() == (0, 0)


@pytest.mark.parametrize("by", ["clean", "the next compilation"])
def test_what_a_killed_compiler_left_is_removed_and_what_a_running_one_uses_is_not(
    by, tmp_path, sources
):
    nvcc = fake_nvcc(
        tmp_path / "a", body=f"echo half > $out; echo $$ >> '{tmp_path}/pids'; exec sleep 300"
    )
    killed, running = start(nvcc, sources), start(nvcc, sources)
    cache, pids = tmp_path / "cache", tmp_path / "pids"
    try:
        wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        killed.kill()
        killed.communicate()
        assert len(cached_names(cache)) == 2
        if by == "clean":
            # The lock, which is empty, and the half of a cubin.
            assert KernelCache(cache).clean() == (0, 5)
        else:
            compiler(fake_nvcc(tmp_path / "b"), sources).compile(SCALE, 90)
        (kept,) = cache.glob(".compiling-*")
        assert len(list(kept.iterdir())) == 2
    finally:
        running.send_signal(signal.SIGINT)
        running.communicate()
        for pid in map(int, pids.read_text().split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert list(cache.glob(".compiling-*")) == []


def test_a_file_that_cannot_be_removed_is_an_error_that_says_how_far_it_got(
    tmp_path, sources, monkeypatch
):
    """Root may remove whatever it likes, so it is the call that fails."""
    nvcc = fake_nvcc(tmp_path / "bin")
    folder = compiler(nvcc, sources).compile(SCALE, 90)[0].cubin.parent

    def refuse(file: Path) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "unlink", refuse)
    message = f"cannot be removed from {folder}: Permission denied; 0 were"
    with pytest.raises(KernelError, match=re.escape(message)):
        KernelCache(folder).clean()


def test_what_another_process_removes_meanwhile_is_neither_listed_nor_missed(
    tmp_path, sources, monkeypatch
):
    kernel, _ = compiler(fake_nvcc(tmp_path / "bin"), sources).compile(SCALE, 90)
    cache = KernelCache(kernel.cubin.parent)
    seen = {name: getattr(cache, name)() for name in ("kernels", "_files")}
    assert cache.clean()[0] == len(seen["kernels"]) == 1
    for name, found in seen.items():
        monkeypatch.setattr(cache, name, lambda found=found: found)
    assert kernel_table(cache, 0.0) == [f"0 kernels, 0.0 kB, in {cache.folder}"]
    assert cache.clean() == (0, 0)


def test_a_cache_folder_that_cannot_be_read_says_what_to_set(tmp_path, sources, monkeypatch):
    nvcc = fake_nvcc(tmp_path / "bin")
    folder = compiler(nvcc, sources).compile(SCALE, 90)[0].cubin.parent

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    for ask in (KernelCache(folder).kernels, KernelCache(folder).clean):
        with pytest.raises(KernelError, match=r"cannot be read: Permission denied; set XDG_CACHE"):
            ask()


def test_clean_of_an_empty_cache_takes_the_folder_too(tmp_path, sources):
    nvcc = fake_nvcc(tmp_path / "bin")
    kernel, _ = compiler(nvcc, sources).compile(SCALE, 90)
    assert KernelCache(kernel.cubin.parent).clean()[0] == 1
    assert not kernel.cubin.parent.exists()
    assert KernelCache(kernel.cubin.parent).clean() == (0, 0)
