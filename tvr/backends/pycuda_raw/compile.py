"""Compiling kernels: a source and its constants become a cubin in the cache.

Nothing here needs a GPU or PyCUDA.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from tvr.backends.pycuda_raw.cache import CompiledKernel, KernelCache, default_cache_dir
from tvr.backends.pycuda_raw.nvcc import TIMEOUT_S, Nvcc, find_nvcc, flag_variables, run_nvcc
from tvr.backends.pycuda_raw.nvcc_log import (
    Resources,
    first_error,
    place_ptx_messages,
    read_kernels,
    read_resources,
    read_warnings,
)
from tvr.backends.pycuda_raw.scratch import scratch_folder
from tvr.backends.pycuda_raw.variants import KernelVariant
from tvr.errors import CompileError, KernelError

_LOG = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "cuda"

FLAGS = ("-cubin", "-std=c++17", "-O3", "--expt-relaxed-constexpr", "-lineinfo", "-Xptxas", "-v")

_INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.M)


def compile_variant(
    variant: KernelVariant,
    sm: int,
    *,
    cache_dir: Path | None = None,
    source_dir: Path | None = None,
) -> Path:
    """Return the cubin of a kernel, from the cache if nothing it was made from has changed.

    Args:
        sm: compute capability, major * 10 + minor.
        cache_dir: default: `default_cache_dir()`.
        source_dir: default: the sources of this package.

    Raises:
        CompileError: nvcc refused the source, or ended without a result.
        KernelError: no nvcc, or it does not know `sm`; no such source, or one that cannot be
            read; a cache that cannot be written.
    """
    return Compiler(find_nvcc(), cache_dir, source_dir).compile(variant, sm)[0].cubin


class Compiler:
    """nvcc with a folder of sources and a cache; threads may share one.

    Args:
        cache_dir: default: `default_cache_dir()`.
        source_dir: default: the sources of this package.
        timeout_s: most seconds for a kernel.
    """

    def __init__(
        self,
        nvcc: Nvcc,
        cache_dir: Path | None = None,
        source_dir: Path | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._timeout_s = timeout_s
        self.nvcc = nvcc
        self.cache = KernelCache(default_cache_dir() if cache_dir is None else cache_dir)
        self.source_dir = SOURCE_DIR if source_dir is None else source_dir

    def compile(
        self, variant: KernelVariant, sm: int, *, force: bool = False
    ) -> tuple[CompiledKernel, bool]:
        """Return a compiled kernel, and whether it was in the cache; `force` compiles it anyway.

        Raises:
            As `compile_variant`.
        """
        self.nvcc.require(sm)
        arch = variant.arch(sm)
        while True:
            key = self._key(variant, arch)
            cubin = self.cache.path(variant.symbol, arch, key)
            found = None if force else self.cache.load(cubin)
            if found is not None and found.key == key:
                return found, True
            with self._scratch() as folder:
                compiled = folder / cubin.name
                began = time.monotonic()
                _LOG.info("compiling %s", variant.symbol)
                resources, log = self._run(variant, sm, compiled)
                kernel = CompiledKernel(
                    cubin=cubin,
                    symbol=variant.symbol,
                    arch=arch,
                    constants=variant.constants,
                    key=key,
                    resources=resources,
                    warnings=read_warnings(log, self.source_dir),
                    seconds=round(time.monotonic() - began, 3),
                )
                # A source saved while nvcc read it would be kept under the key of the old text.
                if self._key(variant, arch) == key:
                    self.cache.store(kernel, compiled)
                    return kernel, False

    def _key(self, variant: KernelVariant, arch: str) -> str:
        """Return a hash of all that the cubin depends on."""
        made_from = [
            self.nvcc.build,
            arch,
            [*FLAGS, *variant.flags, *flag_variables()],
            _texts(self.source_dir / f"{variant.source}.cu", self.source_dir),
        ]
        return sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()

    def _run(self, variant: KernelVariant, sm: int, compiled: Path) -> tuple[Resources, str]:
        """Compile into the file `compiled` and return what the kernel takes, and the log."""
        source = f"{variant.source}.cu"
        command = [
            *(str(self.nvcc.path), *FLAGS, f"-arch={variant.arch(sm)}", *variant.flags),
            *("-I", str(self.source_dir), str(self.source_dir / source), "-o"),
        ]
        log = ""
        try:
            # What ptxas is given is kept until its errors have been read.
            kept = [str(compiled), "--keep", "--keep-dir", str(compiled.parent)]
            code, log = run_nvcc([*command, *kept], compiled.parent, self._timeout_s)
            log = place_ptx_messages(log)
            resources, kernels = read_resources(log), read_kernels(log)
            if code or not compiled.is_file():
                found = first_error(log, self.source_dir) or _how_it_ended(code)
            elif resources is not None and variant.symbol in kernels:
                return resources, log
            else:
                found = (
                    f'{source} compiles, but `ptxas -v` tells of no kernel extern "C" '
                    f"KERNEL_NAME({variant.source}), which is the one that is loaded"
                )
        except subprocess.TimeoutExpired as error:
            found = f"nvcc gave no answer in {error.timeout:.0f} s"
        except OSError as error:
            found = f"nvcc cannot be run: {error.strerror}"
        raise CompileError(
            "; ".join([found, *(f"{flags} is set" for flags in flag_variables())]),
            kernel=variant.label(sm),
            source=source,
            command=shlex.join([*command, f"{variant.symbol}.cubin"]),
            log=log,
        )

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """Yield a folder on the cache's file system, so that a file is moved from it at once."""
        try:
            self.cache.folder.mkdir(parents=True, exist_ok=True)
            with scratch_folder(self.cache.folder) as folder:
                yield folder
        except OSError as error:
            raise KernelError(
                f"compiled kernels cannot be kept in {self.cache.folder}: {error.strerror}; set "
                "XDG_CACHE_HOME, or cache_dir under [options.pycuda], to a folder that can be "
                "written"
            ) from error


def _texts(file: Path, source_dir: Path) -> dict[str, str]:
    """Return by name the text of a source and of all that it includes from its folder.

    What an `#if` leaves out counts too: then a change compiles once too often, never too seldom.
    """
    texts: dict[str, str] = {}
    waiting = [file]
    while waiting:
        file = waiting.pop()
        name = os.path.relpath(file, source_dir)
        if name in texts:
            continue
        try:
            texts[name] = file.read_text("utf-8", "surrogateescape")
        except FileNotFoundError:
            if not texts:
                raise KernelError(f"there is no kernel source {file}") from None
            continue  # the compiler will say so, or leaves it out
        except OSError as error:  # a folder, or not ours to read
            if not texts:
                raise KernelError(
                    f"kernel source {file} cannot be read: {error.strerror}"
                ) from error
            continue  # likewise
        for included in _INCLUDE.findall(texts[name]):
            waiting += {file.parent / included, source_dir / included}
    return texts


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"nvcc was ended by signal {-code} ({signal.strsignal(-code)})"
    if code:
        return f"nvcc ended with exit code {code} and no error"
    return "nvcc ended well, but left no cubin"
