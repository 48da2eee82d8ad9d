"""A kernel as a shared library: compiled by g++ with CUDA's words given a meaning."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tvr.backends.pycuda_raw import variants
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.errors import KernelError

KERNELS = Path(variants.__file__).parent / "cuda"
HEADERS = Path(__file__).parent / "headers"

FLAGS = ("-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique")
WARNINGS = ("-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-unused-parameter")
FAST = ("-O2", "-U_FORTIFY_SOURCE")
DEBUG = ("-O0", "-g", "-U_FORTIFY_SOURCE")

_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)


@cache
def cuda_include() -> Path | None:
    """Return a folder with CUDA's headers: the compiler's, or that of a wheel; None: no such."""
    return next((p for p in _include_folders() if (p / "cuda_fp16.h").is_file()), None)


def _include_folders() -> Iterator[Path]:
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "include"
    if nvcc := shutil.which("nvcc"):
        # nvcc may be a script that calls another; the dry run says where that one looks.
        asked = [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        yield from map(Path, re.findall(r'INCLUDES="-I([^"]+)"', said.stderr))
    import torch

    packages = Path(torch.__file__).parents[1]
    yield from sorted(packages.glob("nvidia/cu*/include"))
    yield packages / "triton/backends/nvidia/include"


def why_not() -> str | None:
    """Return why kernels cannot be compiled for the CPU here; None: they can."""
    if shutil.which("g++") is None:
        return "needs g++"
    return None if cuda_include() else "needs CUDA's headers, of the toolkit or of NVIDIA's wheels"


def build(
    variant: KernelVariant, folder: Path, *, kernels: Path = KERNELS, debug: bool = False
) -> ctypes.CDLL:
    """Return the library of a kernel, compiled if `folder` does not have it.

    Args:
        folder: for libraries, each by a hash of all that it is made of.
        kernels: where `<variant.source>.cu` and what it includes are.
        debug: compile it for a debugger.

    Raises:
        KernelError: it does not compile; with what the compiler said.
    """
    include = cuda_include()
    assert include is not None, "a caller asks why_not() first"
    files = _with_includes(f"{variant.source}.cu", kernels)
    main = f'#include "ptx.cuh"\n#include "{variant.source}.cu"\n'
    files["main.cpp"] = main + f"CUDA_ON_CPU_EXPORT({variant.symbol})\n"
    files |= {path.name: path.read_text() for path in sorted(HEADERS.iterdir())}
    command = ["g++", *FLAGS, *WARNINGS, *(DEBUG if debug else FAST), *variant.flags]
    command += ["-isystem", str(include), "main.cpp", "-o", "kernel.so"]
    text = "\0".join([*command, *(f"{name}\0{text}" for name, text in sorted(files.items()))])
    target = folder / f"{variant.symbol}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    if not target.is_dir():
        _compile(command, files, target)
    library = ctypes.CDLL(str(target / "kernel.so"))
    library.codes.restype = ctypes.c_char_p
    library.run.restype = ctypes.c_char_p
    return library


def _with_includes(name: str, folder: Path) -> dict[str, str]:
    """Return a source and all that it includes of its folder, by name."""
    found: dict[str, str] = {}
    names = [name]
    while names:
        name = names.pop()
        if name not in found and (folder / name).is_file():
            found[name] = (folder / name).read_text()
            names += _INCLUDE.findall(found[name])
    return found


def _compile(command: list[str], files: dict[str, str], target: Path) -> None:
    """Compile in a folder of its own, and move that into place: two processes may do the same."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    for name, text in files.items():
        (scratch / name).write_text(text)
    done = subprocess.run(
        command, cwd=scratch, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        shutil.rmtree(scratch)
        raise KernelError(f"{' '.join(command)} failed:\n{done.stderr}")
    (scratch / "warnings.txt").write_text(done.stderr)
    try:
        scratch.rename(target)
    except OSError:  # the other process was faster
        shutil.rmtree(scratch)
