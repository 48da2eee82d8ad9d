"""Kernels start while the one in front still runs: none may touch its results before it waits.

That every thread waits, on every path and before it touches a tensor, is seen where kernels are run
on a CPU (test_pycuda_kernels.py). Here is what is left: kernels that are not run there, and what
compilers do, which move loads of constants across the wait.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tvr.backends.pycuda_raw.catalog import standard_jobs
from tvr.backends.pycuda_raw.compile import SOURCE_DIR, compile_variant
from tvr.backends.pycuda_raw.nvcc import find_nvcc
from tvr.errors import KernelError

SOURCES = sorted(SOURCE_DIR.glob("*.cu"))
PTX = SOURCE_DIR / "ptx.cuh"

#: Kernels that load what no kernel writes before they wait, and where the wait is.
EARLY = {
    "linear": "linear.cu",
    "rms_norm": "rms_norm.cu",
    "add_rms_norm": "add_rms_norm.cu",
}

#: Loads and stores of SASS that may be of global memory.
GLOBAL_ACCESS = re.compile(r"(LD|LDG|LDGSTS|ST|STG|ATOM|ATOMG|RED|REDG)(\.|$)")


def body(source: Path) -> str:
    """Return what stands in the braces of a source's kernel, without comments."""
    text = re.sub(r"//.*", "", source.read_text())
    _, kernel = text.split('extern "C" __global__', 1)
    return kernel[kernel.index(") {") + 3 :]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_kernel_waits_before_it_can_return(source):
    if source.stem in EARLY:
        pytest.skip("waits behind its first loads, as is seen where it is run on a CPU")
    before, _ = body(source).split("wait_for_inputs();", 1)
    assert "return" not in before
    assert before.count("{") == before.count("}"), "the wait is in a branch"
    # Declarations of shared memory, and nothing that reads a parameter.
    rest = re.sub(r"__shared__ [\w\[\] /]+;|DYNAMIC_SHARED\(\w+\);|let_next_start\(\);", "", before)
    assert not rest.strip()


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_every_kernel_lets_the_next_one_start(source):
    assert body(source).count("let_next_start();") == 1


def test_no_source_calls_memory_constant():
    """Not `__restrict__` either: of what it points to, nvcc makes loads of constants."""
    for path in SOURCE_DIR.iterdir():
        code = re.sub(r"//.*", "", path.read_text())
        assert not re.search(r"__restrict__|__ldg|global\.nc", code), path.name


def test_only_what_no_kernel_writes_is_loaded_early():
    users = {p.name for p in SOURCE_DIR.iterdir() if "load_16_early" in p.read_text()}
    assert users == {PTX.name, "linear.cu", "norm.cuh"}


def nvdisasm() -> Path | None:
    """Return the disassembler: a toolkit's, or the one that Triton has."""
    if found := shutil.which("nvdisasm"):
        return Path(found)
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    path = Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm"
    return path if path.is_file() else None


def has_nvcc() -> bool:
    try:
        find_nvcc().require(90)
    except KernelError:
        return False
    return True


def instructions(cubin: Path) -> list[str]:
    """Return the names of a kernel's instructions, in the order of their addresses."""
    command = [str(nvdisasm()), "-c", str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", said, re.MULTILINE
    )


@pytest.mark.slow
@pytest.mark.skipif(not has_nvcc() or nvdisasm() is None, reason="needs nvcc and nvdisasm")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_compiled_kernel_touches_memory_before_it_waits(dtype, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "cubins"
    for job in standard_jobs(90, [dtype], [64]):
        cubin = compile_variant(job.variant, 90, cache_dir=folder)
        found = instructions(cubin)
        assert not any("CONSTANT" in name for name in found), cubin.name
        before = found[: found.index("ACQBULK")]
        touched = [name for name in before if GLOBAL_ACCESS.match(name)]
        # Of `linear`, 16 bytes for each of 8 steps; the norms' first wait is of another path.
        most = 8 if job.variant.source == "linear" else 0
        assert len(touched) <= most, f"{cubin.name}: {touched}"
        assert all(".128" in name for name in touched)
