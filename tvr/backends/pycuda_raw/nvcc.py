"""Finding the CUDA compiler, and running it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from tvr.errors import KernelError

MIN_VERSION = (12, 0)
WHEEL = "nvidia-cuda-nvcc"
#: Has `nv/target`, which cuda_fp16.h includes and the compiler's wheel does not ask for.
HEADERS_WHEEL = "nvidia-cuda-cccl"

#: A kernel takes seconds; what takes this long hangs.
TIMEOUT_S = 600.0

#: Variables that change what nvcc does.
FLAG_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


@dataclass(frozen=True)
class Nvcc:
    """A CUDA compiler.

    Attributes:
        path: its program.
        version: (13, 0).
        build: tells every build of it from the others.
        sms: the architectures it compiles for, major * 10 + minor.
    """

    path: Path
    version: tuple[int, int]
    build: str
    sms: tuple[int, ...]

    def require(self, sm: int) -> None:
        """Refuse an architecture that this compiler does not know.

        Raises:
            KernelError: naming those it knows.
        """
        if sm not in self.sms:
            known = ", ".join(f"sm_{known}" for known in self.sms)
            raise KernelError(
                f"nvcc {self.version[0]}.{self.version[1]} ({self.path}) does not compile for "
                f"sm_{sm}; it does for {known}. Another architecture needs another CUDA toolkit"
            )


def find_nvcc(
    environ: Mapping[str, str] | None = None, packages: Sequence[str] | None = None
) -> Nvcc:
    """Return the compiler: the one on PATH, in CUDA_HOME, in CUDA_PATH or in NVIDIA's wheel.

    One that is too old or does not run is passed over.

    Args:
        environ: default: the process's.
        packages: folders that packages are installed in; default: `sys.path`.

    Raises:
        KernelError: there is none; one line says where it was looked for, and what was there.
    """
    passed_over = []
    for place, path in _places(os.environ if environ is None else environ, packages):
        if path is None:
            passed_over.append(f"not {place}")
            continue
        try:
            return _ask(path)
        except KernelError as error:
            passed_over.append(f"{place} {error}")
    raise KernelError(
        f"no usable nvcc: {'; '.join(passed_over)}. Install the CUDA toolkit "
        f"{MIN_VERSION[0]}.{MIN_VERSION[1]} or newer, or: pip install {WHEEL} {HEADERS_WHEEL}"
    )


def _places(
    environ: Mapping[str, str], packages: Sequence[str] | None
) -> Iterator[tuple[str, Path | None]]:
    """Yield where nvcc may be, in words, and its path if it is there."""
    found = shutil.which("nvcc", path=environ.get("PATH", ""))
    yield "on PATH", Path(found) if found else None
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := environ.get(variable):
            path = Path(folder) / "bin" / "nvcc"
            yield f"in {variable} ({folder})", path if path.is_file() else None
        else:
            yield f"in {variable} (not set)", None
    search = list(sys.path if packages is None else packages)
    wheels = [f for wheel in distributions(name=WHEEL, path=search) for f in wheel.files or ()]
    # nvidia/cu13/bin/nvcc, beside it ../include; the wheels of CUDA 12 hold no nvcc.
    programs = [Path(str(f.locate())) for f in wheels if f.parts[-2:] == ("bin", "nvcc")]
    yield f"in the package {WHEEL}", programs[0] if programs else None


@cache
def _ask(path: Path) -> Nvcc:
    """Return the compiler at `path` with what it says of itself.

    Raises:
        KernelError: it does not run, is too old, or lacks headers; begins with its path.
    """
    said = _output([str(path), "--version"])
    version = re.search(r"release (\d+)\.(\d+)", said)
    if version is None:
        raise KernelError(f"{path} says no version")
    major, minor = int(version[1]), int(version[2])
    if (major, minor) < MIN_VERSION:
        wanted = ".".join(map(str, MIN_VERSION))
        raise KernelError(f"{path} is {major}.{minor}, older than {wanted}")
    if _lacks_headers(path.parent.parent / "include"):
        raise KernelError(f"{path} lacks headers: pip install {HEADERS_WHEEL}")
    listed = re.findall(r"compute_(\d+)\b", _output([str(path), "--list-gpu-arch"]))
    build = " ".join(said.split())
    return Nvcc(path, (major, minor), build, tuple(sorted(map(int, listed))))


def _lacks_headers(include: Path) -> bool:
    """Return whether CUDA's headers are in `include` without those that they include."""
    needed = (include / "nv" / "target", include / "cccl" / "nv" / "target")
    return (include / "cuda_fp16.h").is_file() and not any(file.is_file() for file in needed)


def _output(command: Sequence[str]) -> str:
    # Flags from the environment are for compiling: a wrong one is told of there.
    environ = {name: value for name, value in os.environ.items() if name not in FLAG_VARIABLES}
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environ,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        said = " ".join(done.stdout.split()) or "nothing"
        raise KernelError(
            f"{command[0]} does not run: {command[1]} ends with exit code {done.returncode} and "
            f"says {said}"
        )
    return done.stdout


def flag_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the variables that give nvcc flags, as `NAME=flags`."""
    environ = os.environ if environ is None else environ
    return [f"{name}={environ[name]}" for name in FLAG_VARIABLES if environ.get(name)]


def run_nvcc(command: Sequence[str], scratch: Path, timeout_s: float) -> tuple[int, str]:
    """Run nvcc to its end and return its exit code and what it printed.

    Args:
        scratch: a folder for its temporary files.

    Raises:
        subprocess.TimeoutExpired: it took too long; it is ended, and what it started with it.
    """
    environ = {**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C"}
    # In a session of its own, so that the programs nvcc starts can be ended with it.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environ,
        start_new_session=True,
    ) as process:
        try:
            log, _ = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, log
