"""The cache of compiled kernels: a folder of cubins, each with a record of what it is."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from tvr.backends.pycuda_raw.nvcc_log import Resources
from tvr.backends.pycuda_raw.scratch import remove_left
from tvr.errors import ConfigError, KernelError

#: The keys of `[options.pycuda]`.
OPTIONS = ("cache_dir",)

_FILE = re.compile(r"(?P<symbol>\w+)-(?P<arch>sm_\d+a?)-(?P<key>[0-9a-f]{16})\.(?:cubin|json)")


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A kernel in the cache.

    Attributes:
        cubin: its file.
        symbol: the kernel's name in it.
        arch: as the compiler has it: `sm_90`.
        constants: those it was compiled with, but for dtype and head_dim: "STAGES=3 CTAS=2".
        key: hash of all that it was made from.
        resources: what it takes.
        warnings: what the compiler said of it.
        seconds: what compiling it took.
    """

    cubin: Path
    symbol: str
    arch: str
    constants: str
    key: str
    resources: Resources
    warnings: tuple[str, ...]
    seconds: float


def default_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return `$XDG_CACHE_HOME/tvr/kernels`, or that in `~/.cache`.

    Raises:
        ConfigError: there is no home folder.
    """
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # others are to be ignored, the XDG specification says
        return Path(base, "tvr", "kernels")
    try:
        return Path.home() / ".cache" / "tvr" / "kernels"
    except RuntimeError as error:
        raise ConfigError(
            f"no folder for compiled kernels: {error}; set XDG_CACHE_HOME, or cache_dir under "
            "[options.pycuda]"
        ) from error


def configured_cache_dir(options: Mapping[str, object]) -> Path | None:
    """Return `cache_dir` of `[options.pycuda]`; None: it is not set.

    Raises:
        ConfigError: it is no path, or there are other keys.
    """
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise ConfigError(
            f"[options.pycuda] has {', '.join(unknown)}; allowed: {', '.join(OPTIONS)}"
        )
    folder = options.get("cache_dir")
    if folder is None:
        return None
    if not isinstance(folder, str) or not folder:
        raise ConfigError(f"[options.pycuda] cache_dir is {folder!r}; it must be a path")
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"[options.pycuda] cache_dir is {folder!r}, and there is no such home folder; name "
            "the folder in full"
        ) from error


class KernelCache:
    """A folder of compiled kernels. Several processes may read and write it at once.

    A cubin counts only beside a record with its hash. The record is put in place first, the cubin
    second, both by renaming: another process sees a whole kernel or none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, symbol: str, arch: str, key: str) -> Path:
        """Return where a kernel's cubin is or will be."""
        return self.folder / f"{symbol}-{arch}-{key[:16]}.cubin"

    def load(self, cubin: Path) -> CompiledKernel | None:
        """Return the kernel in `cubin`; None: it is not there, or damaged."""
        try:
            record = json.loads(cubin.with_suffix(".json").read_text("utf-8"))
            if record["sha256"] != sha256(cubin.read_bytes()).hexdigest():
                return None
            return CompiledKernel(
                cubin=cubin,
                symbol=record["symbol"],
                arch=record["arch"],
                constants=record["constants"],
                key=record["key"],
                resources=Resources(**record["resources"]),
                warnings=tuple(record["warnings"]),
                seconds=float(record["seconds"]),
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def store(self, kernel: CompiledKernel, compiled: Path) -> None:
        """Move the file `compiled`, which lies in the folder of the cache, to `kernel.cubin`."""
        record = asdict(kernel) | {"sha256": sha256(compiled.read_bytes()).hexdigest()}
        del record["cubin"]
        written = compiled.with_suffix(".json")
        written.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        os.replace(written, kernel.cubin.with_suffix(".json"))
        os.replace(compiled, kernel.cubin)

    def kernels(self) -> list[CompiledKernel]:
        """Return every whole kernel, by name.

        Raises:
            KernelError: the folder cannot be read.
        """
        found = (self.load(file) for file in self._files() if file.suffix == ".cubin")
        return [kernel for kernel in found if kernel is not None]

    def clean(self) -> tuple[int, int]:
        """Remove every kernel and what killed compilers left; return how many, and the bytes.

        Files that the cache did not write stay, and so does the folder if it has any.

        Raises:
            KernelError: a file cannot be removed, or the folder cannot be read.
        """
        kernels, size = 0, 0
        try:
            for file in self._files():
                with suppress(FileNotFoundError):  # another process was faster
                    num_bytes = file.stat().st_size
                    file.unlink()
                    size += num_bytes
                    kernels += file.suffix == ".cubin"
            size += remove_left(self.folder)
            if self.folder.is_dir() and not any(self.folder.iterdir()):
                with suppress(OSError):  # it is gone, or another process has begun to fill it
                    self.folder.rmdir()
        except OSError as error:
            raise KernelError(
                f"compiled kernels cannot be removed from {self.folder}: {error.strerror}; "
                f"{kernels} were"
            ) from error
        return kernels, size

    def _files(self) -> list[Path]:
        try:
            if not self.folder.is_dir():
                return []
            named = (file for file in self.folder.iterdir() if _FILE.fullmatch(file.name))
            return sorted(file for file in named if file.is_file())
        except OSError as error:
            raise KernelError(
                f"the folder of compiled kernels {self.folder} cannot be read: {error.strerror}; "
                "set XDG_CACHE_HOME, or cache_dir under [options.pycuda], to another"
            ) from error
