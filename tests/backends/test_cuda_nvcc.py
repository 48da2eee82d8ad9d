"""Where nvcc is found, and what is read from its output."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from support.fake_nvcc import fake_nvcc, ptxas_log
from tvr.backends.pycuda_raw import nvcc as nvcc_module
from tvr.backends.pycuda_raw.compile import Compiler
from tvr.backends.pycuda_raw.nvcc import find_nvcc
from tvr.backends.pycuda_raw.nvcc_log import (
    Resources,
    first_error,
    read_messages,
    read_resources,
    read_warnings,
)
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.errors import CompileError, KernelError


def wheel(site: Path, *, version="13.0", headers=True) -> Path:
    """Lay out the package nvidia-cuda-nvcc as pip does, and return its nvcc."""
    nvcc = fake_nvcc(site / "nvidia" / "cu13" / "bin", version=version)
    include = nvcc.parent.parent / "include"
    (include / "cccl" / "nv").mkdir(parents=True)
    (include / "cuda_fp16.h").touch()
    if headers:
        (include / "cccl" / "nv" / "target").touch()
    info = site / "nvidia_cuda_nvcc-13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cuda-nvcc\nVersion: 13.0\n")
    (info / "RECORD").write_text("nvidia/cu13/bin/ptxas,,\nnvidia/cu13/bin/nvcc,,\n")
    return nvcc


@pytest.fixture
def machine(tmp_path):
    """A machine that has an nvcc wherever one can be."""
    for name in ("path", "home/bin", "other/bin"):
        fake_nvcc(tmp_path / name)
    wheel(tmp_path / "site")
    return tmp_path


PLACES = {
    "PATH": "path/nvcc",
    "CUDA_HOME": "home/bin/nvcc",
    "CUDA_PATH": "other/bin/nvcc",
    "wheel": "site/nvidia/cu13/bin/nvcc",
}


@pytest.mark.parametrize("first", range(4))
def test_nvcc_is_taken_from_the_first_place_that_has_it(first, machine):
    folders = {"PATH": "path", "CUDA_HOME": "home", "CUDA_PATH": "other"}
    environ = {name: str(machine / folder) for name, folder in list(folders.items())[first:]}
    found = find_nvcc(environ, [str(machine / "site")])
    assert found.path == machine / list(PLACES.values())[first]
    assert found.version == (13, 0)
    assert found.sms == (80, 90, 120)


def test_where_there_is_none_one_line_says_where_it_was_looked_for(tmp_path):
    (tmp_path / "home").mkdir()
    environ = {"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path / "home")}
    with pytest.raises(KernelError) as caught:
        find_nvcc(environ, [str(tmp_path)])
    assert str(caught.value) == (
        f"no usable nvcc: not on PATH; not in CUDA_HOME ({tmp_path}/home); not in CUDA_PATH (not "
        "set); not in the package nvidia-cuda-nvcc. Install the CUDA toolkit 12.0 or newer, or: "
        "pip install nvidia-cuda-nvcc nvidia-cuda-cccl"
    )


def test_an_old_or_broken_nvcc_is_passed_over(tmp_path):
    old = fake_nvcc(tmp_path / "old", version="11.8")
    broken = tmp_path / "home" / "bin" / "nvcc"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\necho no licence >&2\nexit 1\n")
    broken.chmod(0o755)
    environ = {"PATH": str(old.parent), "CUDA_HOME": str(tmp_path / "home")}
    with pytest.raises(KernelError) as caught:
        find_nvcc(environ, [])
    assert f"on PATH {old} is 11.8, older than 12.0" in str(caught.value)
    assert f"{broken} does not run: --version ends with exit code 1 and says no licence" in str(
        caught.value
    )
    good = wheel(tmp_path / "site")
    assert find_nvcc(environ, [str(tmp_path / "site")]).path == good


def test_a_wheel_without_the_headers_that_its_headers_need_is_refused(tmp_path):
    wheel(tmp_path, headers=False)
    with pytest.raises(KernelError, match="lacks headers: pip install nvidia-cuda-cccl"):
        find_nvcc({"PATH": ""}, [str(tmp_path)])


def test_resources_are_read_and_those_of_functions_not_inlined_added():
    helper = (
        "ptxas info    : Function properties for helper\n"
        "    8 bytes stack frame, 4 bytes spill stores, 2 bytes spill loads\n"
    )
    log = ptxas_log(168, stack=96, stores=20, loads=24) + helper
    assert read_resources(log) == Resources(168, 512, 104, 24, 26)
    # CUDA 12 names the constant bank, and no shared memory where there is none.
    assert read_resources(
        ptxas_log().replace(", used 1 barriers, 512 bytes smem", ", 360 bytes cmem[0]")
    ) == (Resources(40, 0, 0, 0, 0))
    assert read_resources("nvcc fatal   : Unsupported gpu architecture 'sm_70'\n") is None


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            '/src/a.cu(2): warning #550-D: variable "s" was set but never used\n\n'
            'Remark: The warnings can be suppressed with "-diag-suppress <warning-number>"\n'
            '/src/b.cuh(7): error: identifier "zz" is undefined\n'
            '/src/a.cu(9): error: expected a ";"\n',
            'b.cuh:7: error: identifier "zz" is undefined',
        ),
        (
            "/src/a.cu:3:10: fatal error: no.cuh: No such file or directory\n    3 | #include\n",
            "a.cu:3: error: no.cuh: No such file or directory",
        ),
        (
            'In file included from /src/a.cu:1:\n/src/b.cuh:5:2: error: #error "set HEAD_DIM"\n',
            'b.cuh:5: error: #error "set HEAD_DIM"',
        ),
        (
            '/src/a.cu(4): error: static assertion failed with "no"\n',
            'a.cu:4: error: static assertion failed with "no"',
        ),
        (
            '/usr/include/cuda_fp16.h(1): catastrophic error: cannot open source file "x"\n',
            '/usr/include/cuda_fp16.h:1: error: cannot open source file "x"',
        ),
        (
            "ptxas error   : Entry function 'k' uses too much shared data (0xc35 bytes)\n",
            "ptxas error : Entry function 'k' uses too much shared data (0xc35 bytes)",
        ),
        (
            "ptxas /tmp/x.ptx, line 23; error   : Unknown modifier '.bar'\nptxas fatal   : End\n",
            "ptxas /tmp/x.ptx, line 23; error : Unknown modifier '.bar'",
        ),
        (
            "gcc: No such file\nnvcc fatal   : Failed to preprocess host compiler properties.\n",
            "nvcc fatal : Failed to preprocess host compiler properties.",
        ),
        (ptxas_log(), None),
    ],
)
def test_the_first_error_is_found_with_its_place(log, expected):
    assert first_error(log, Path("/src")) == expected


def test_warnings_are_read_once_each():
    log = (
        "/src/a.cu(2): warning #550-D: never used\n" * 2
        + "Remark: The warnings can be suppressed\n"
        + "ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized\n"
        + ptxas_log()
    )
    assert read_warnings(log, Path("/src")) == (
        "a.cu(2): warning #550-D: never used",
        "ptxas info : (C7510) Potential Performance Loss: wgmma is serialized",
    )


def test_equal_complaints_have_equal_first_lines_and_the_rest_is_left_out():
    log = (
        "In file included from /src/a.cu:1:\n"
        "/src/b.cuh(2): error: odd\n  text;\n      ^\n"
        "          detected during instantiation at line 2 of /src/a.cu\n\n"
        "gcc: no such file\n"
        "ptxas fatal   : Ptx assembly aborted due to errors\n"
        '1 error detected in the compilation of "/src/a.cu".\n' + ptxas_log()
    )
    (first, message), other = read_messages(log)
    assert first == "/src/b.cuh(2): error: odd"
    assert message.splitlines()[1:3] == ["  text;", "      ^"]
    assert message.endswith("line 2 of /src/a.cu")
    assert other == ("gcc: no such file", "gcc: no such file")


@pytest.fixture(scope="module")
def real_nvcc():
    try:
        return find_nvcc()
    except KernelError as error:
        pytest.skip(str(error))


SPILLING = """\
extern "C" __global__ void __launch_bounds__(1024) crowd_fp32(float* p, int n) {
  float a[100];
  for (int i = 0; i < 100; ++i) a[i] = p[i * 7 + threadIdx.x];
  for (int k = 0; k < n; ++k)
    for (int i = 0; i < 100; ++i) a[i] = a[i] * a[(i + 37) % 100] + 1;
  for (int i = 0; i < 100; ++i) p[i] = a[i];
}
"""
CROWD = KernelVariant(source="crowd", dtype="float32")


def test_the_real_compiler_says_what_a_kernel_takes(real_nvcc, tmp_path):
    (tmp_path / "crowd.cu").write_text(SPILLING)
    kernel, _ = Compiler(real_nvcc, tmp_path / "cache", tmp_path).compile(CROWD, 90)
    assert kernel.cubin.read_bytes().startswith(b"\x7fELF")
    # A block of 1024 threads leaves 64 registers to each.
    assert 0 < kernel.resources.registers <= 64
    assert kernel.resources.spill_store_bytes > 0
    assert kernel.resources.stack_bytes > 0


def test_the_real_compilers_error_is_one_line_and_its_command_repeats_it(real_nvcc, tmp_path):
    (tmp_path / "crowd.cu").write_text(SPILLING.replace("a[i] * ", "b[i] * "))
    with pytest.raises(CompileError) as caught:
        Compiler(real_nvcc, tmp_path / "cache", tmp_path).compile(CROWD, 90)
    assert str(caught.value).startswith('crowd.cu:5: error: identifier "b" is undefined; ')
    again = subprocess.run(
        caught.value.command,
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        check=False,
    )
    assert again.returncode != 0
    assert 'identifier "b" is undefined' in again.stdout + again.stderr
    assert re.search(r"crowd\.cu\(5\)", caught.value.log)


def real_failure(real_nvcc, folder: Path, source: str) -> CompileError:
    (folder / "crowd.cu").write_text(source)
    with pytest.raises(CompileError) as caught:
        Compiler(real_nvcc, folder / "cache", folder).compile(CROWD, 90)
    return caught.value


def test_what_the_assembler_refuses_is_placed_where_it_was_written(real_nvcc, tmp_path):
    (tmp_path / "odd.cuh").write_text(
        "__device__ inline float odd(float x) {\n"
        """  asm("madd.bar %0, %0;" : "+f"(x));\n"""
        "  return x;\n}\n"
    )
    source = '#include "odd.cuh"\n' + SPILLING.replace("a[i] * ", "odd(a[i]) * ")
    error = real_failure(real_nvcc, tmp_path, source)
    assert error.found.startswith("odd.cuh:2: error: ptxas: ")
    assert "madd.bar %f, %f;`" in error.found  # whatever the registers' numbers
    assert str(error).startswith(f"{error.found}; crowd_fp32 sm_90 from crowd.cu was compiled by: ")
    assert "cache" not in error.log


@pytest.mark.parametrize(
    "declared",
    ["__global__ void __launch_bounds__(1024) crowd_fp32", "__device__ void crowd_fp32"],
)
def test_a_source_without_the_kernel_it_is_named_after_is_refused(declared, real_nvcc, tmp_path):
    usual = 'extern "C" __global__ void __launch_bounds__(1024) crowd_fp32'
    assert usual in SPILLING
    error = real_failure(real_nvcc, tmp_path, SPILLING.replace(usual, declared))
    assert error.found == (
        'crowd.cu compiles, but `ptxas -v` tells of no kernel extern "C" KERNEL_NAME(crowd), '
        "which is the one that is loaded"
    )


def test_a_wrong_flag_in_the_environment_hides_no_compiler(real_nvcc, tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "--nonsense")
    nvcc_module._ask.cache_clear()
    assert find_nvcc() == real_nvcc
    error = real_failure(real_nvcc, tmp_path, SPILLING)
    assert error.found == (
        "nvcc fatal : Unknown option '--nonsense'; NVCC_APPEND_FLAGS=--nonsense is set"
    )


def test_nvccs_temporary_files_go_with_it(real_nvcc, tmp_path, monkeypatch):
    (tmp_path / "crowd.cu").write_text(SPILLING)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "none"))
    kernel, _ = Compiler(real_nvcc, tmp_path / "cache", tmp_path).compile(CROWD, 80)
    assert len(os.listdir(kernel.cubin.parent)) == 2
