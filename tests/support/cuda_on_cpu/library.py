"""A kernel as a shared library: compiled by g++ with CUDA's words given a meaning."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from tvr.backends.pycuda_raw import variants
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.errors import KernelError

KERNELS = Path(variants.__file__).parent / "cuda"
RUNTIME = Path(__file__).parent / "cpp"

FLAGS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-U_FORTIFY_SOURCE")
# Kernels look at the same bytes as several types, and have pragmas for another compiler.
OF_KERNELS = (
    "-fno-strict-aliasing",
    "-fno-threadsafe-statics",
    "-Wno-unknown-pragmas",
    "-Wno-unused-parameter",
)
OPTIMISED = ("-O2",)
# With the slow way to switch threads, which other processors than x86-64 always take.
FOR_DEBUGGER = ("-O0", "-g", "-DCUDA_ON_CPU_UCONTEXT")
# Calls functions of sanitize.h, before each access to memory and where something is wrong.
CHECKED = ("-fsanitize=thread,alignment,bounds,shift,signed-integer-overflow",)

_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)


@cache
def cuda_headers() -> tuple[Path, ...]:
    """Return the folders of CUDA's headers, the compiler's or those of wheels; empty: none."""
    for folder in _toolkits():
        folders = (folder, folder / "cccl")  # the second has nv/target, which cuda_fp16.h includes
        if all(any((f / name).is_file() for f in folders) for name in ("cuda_fp16.h", "nv/target")):
            return folders
    return ()


def _toolkits() -> Iterator[Path]:
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home) / "include"
    if nvcc := shutil.which("nvcc"):
        # nvcc may be a script that calls another; the dry run says where that one looks.
        asked = [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        yield from map(Path, re.findall(r'INCLUDES="-I([^"]+)"', said.stderr))
    for package in map(Path, sys.path):
        yield from sorted(package.glob("nvidia/cu*/include"))


def why_not() -> str | None:
    """Return why kernels cannot be compiled for the CPU here; None: they can."""
    if shutil.which("g++") is None:
        return "needs g++"
    return None if cuda_headers() else "needs CUDA's headers, of the toolkit or of NVIDIA's wheels"


def build(
    variant: KernelVariant,
    folder: Path,
    *,
    kernels: Path = KERNELS,
    checked: bool = False,
    debug: bool = False,
) -> ctypes.CDLL:
    """Return the library of a kernel, compiled if `folder` does not have it.

    Args:
        folder: for libraries, each by a hash of all that it is made of.
        kernels: where `<variant.source>.cu` and what it includes are.
        checked: check every access to memory.
        debug: compile it for a debugger.

    Raises:
        KernelError: it does not compile; with what the compiler said.
    """
    source = f"{variant.source}.cu"
    level = FOR_DEBUGGER if debug else OPTIMISED
    runtime = {path.name: path.read_text() for path in RUNTIME.iterdir()}
    linked = _compile("runtime.cpp", runtime, folder, ["-c", *level])
    files = runtime | {
        # The emulated ptx.cuh lies where the other would be found.
        **{n: t for n, t in _with_includes(source, kernels).items() if n != "ptx.cuh"},
        f"{variant.symbol}.cpp": (
            f'#include "launch.h"\n#include "ptx.cuh"\n#include "{source}"\n'
            f"CUDA_ON_CPU_EXPORT({variant.symbol})\n"
        ),
    }
    flags = ["-c", *level, *OF_KERNELS, *(CHECKED if checked else ()), *variant.flags]
    kernel = _compile(f"{variant.symbol}.cpp", files, folder, flags)
    library = _make(folder / f"{kernel.parent.name}-{linked.parent.name}", "kernel.so", {}, [
        "-shared", str(kernel), str(linked)
    ])  # fmt: skip
    loaded = ctypes.CDLL(str(library))
    loaded.kernel_codes.restype = ctypes.c_char_p
    loaded.kernel_run.restype = ctypes.c_char_p
    return loaded


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


def _compile(name: str, files: dict[str, str], folder: Path, flags: Sequence[str]) -> Path:
    """Return the object of one of `files`; where it lies says all that it depends on."""
    assert cuda_headers(), "a caller asks why_not() first"
    headers = [f"-isystem{folder}" for folder in cuda_headers()]
    arguments = [*FLAGS, "-Wall", "-Wextra", *flags, *headers, name]
    text = "\0".join([*arguments, *(f"{name}\0{text}" for name, text in sorted(files.items()))])
    target = folder / f"{Path(name).stem}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return _make(target, "code.o", files, arguments)


def _make(target: Path, product: str, files: dict[str, str], arguments: Sequence[str]) -> Path:
    """Return `product` in the folder `target`; made where g++ has `files` if it is not there."""
    if target.is_dir():
        return target / product
    target.parent.mkdir(parents=True, exist_ok=True)
    # In a folder of its own, which is moved into place: two processes may do the same.
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    for name, text in files.items():
        (scratch / name).write_text(text)
    command = ["g++", *arguments, "-o", product]
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
    return target / product
