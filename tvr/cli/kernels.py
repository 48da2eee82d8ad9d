"""`tvr kernels`: the CUDA backend's compiled kernels. Needs neither a GPU nor PyCUDA."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvr.cli import options
from tvr.cli.exits import EXIT_FAILED
from tvr.errors import ConfigError

if TYPE_CHECKING:
    from tvr.backends.pycuda_raw.cache import KernelCache

#: Built for where torch sees no GPU that the kernels serve.
USUAL_SMS = (80, 90, 120)

app = typer.Typer()


@app.callback(invoke_without_command=True)
def kernels(context: typer.Context) -> None:
    """Compile CUDA kernels ahead, list and remove them."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(short_help="Compile kernels ahead, several at once.")
def build(
    *,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="sm_NN,...", help="GPUs to compile for. Default: those here, or the usual ones."
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(metavar="NAME,...", help="Activation dtypes. Default: all.")
    ] = None,
    head_dim: Annotated[
        list[str] | None, typer.Option(metavar="N,...", help="Widths of a head. Default: all.")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Compilers at once. Default: the CPUs.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Compile what is in the cache too.")
    ] = False,
    check_spills: Annotated[
        bool, typer.Option("--check-spills", help="Exit code 1 if a decode kernel spills.")
    ] = False,
    plugins: options.Plugins = None,
    debug: options.Debug = False,
) -> int:
    """Compile the kernels that the ops load, so that no engine has to.

    Exit code 1 if a kernel does not compile; all are tried.
    """
    from tvr.backends.pycuda_raw.compile import Compiler
    from tvr.backends.pycuda_raw.nvcc import find_nvcc

    # The compiler first: what comes next takes seconds.
    nvcc = find_nvcc()
    from tvr.backends.pycuda_raw.build import build
    from tvr.backends.pycuda_raw.catalog import standard_jobs
    from tvr.backends.pycuda_raw.plugin import HEAD_DIMS
    from tvr.cli.kernels_text import Report, build_reporter
    from tvr.contract import DTYPES

    sms = _sms(options.listed(arch))
    for sm in sms:
        nvcc.require(sm)
    dtypes = _chosen("--dtype", options.listed(dtype), DTYPES)
    widths = _chosen("--head-dim", options.listed(head_dim), [str(width) for width in HEAD_DIMS])
    wanted = [job for sm in sms for job in standard_jobs(sm, dtypes, [int(w) for w in widths])]
    options.allow_interrupts()
    began = time.monotonic()
    with build_reporter(len(wanted)) as show:
        outcomes = build(
            Compiler(nvcc, _cache(plugins).folder),
            wanted,
            workers=jobs or os.cpu_count() or 1,
            force=force,
            report=show,
        )
    report = Report(outcomes, time.monotonic() - began)
    report.print()
    return EXIT_FAILED if report.failed or (check_spills and report.decode_spills) else 0


@app.command("list", short_help="List the compiled kernels and what they take.")
def list_kernels(*, plugins: options.Plugins = None, debug: options.Debug = False) -> None:
    """List the kernels in the cache: registers, shared memory, spills, size, age."""
    from tvr.cli.kernels_text import kernel_table

    for line in kernel_table(_cache(plugins), time.time()):
        typer.echo(line)


@app.command(short_help="Remove the compiled kernels.")
def clean(*, plugins: options.Plugins = None, debug: options.Debug = False) -> None:
    """Remove every kernel from the cache; other files in its folder stay."""
    from tvr.cli.kernels_text import size_text

    cache = _cache(plugins)
    kernels, size = cache.clean()
    typer.echo(f"removed {kernels} kernels, {size_text(size)}, from {cache.folder}")


def _cache(plugins: str | None) -> KernelCache:
    """Return the cache that the backend uses too."""
    from tvr.backends.pycuda_raw.cache import (
        KernelCache,
        configured_cache_dir,
        default_cache_dir,
    )
    from tvr.core.plugin_config import PluginConfig, find_config

    config = PluginConfig.load(find_config(plugins, os.environ))
    folder: Path | None = configured_cache_dir(config.options.get("pycuda", {}))
    return KernelCache(folder or default_cache_dir())


def _sms(names: tuple[str, ...] | None) -> list[int]:
    """Return the architectures asked for, or those of the GPUs here, or the usual ones."""
    from tvr.backends.pycuda_raw.variants import MIN_SM

    if names is None:
        # An older GPU beside newer ones is served by another backend.
        return [sm for sm in _present_sms() if sm >= MIN_SM] or list(USUAL_SMS)
    sms = []
    for name in names:
        match = re.fullmatch(r"sm_(\d{2,3})([af]?)", name)
        if match is None:
            raise ConfigError(f"--arch {name!r} is no architecture as in sm_90 or sm_80,sm_90")
        if match[2]:
            raise ConfigError(
                f"--arch {name}: write sm_{match[1]}, the GPU; kernels that need sm_{match[1]}a "
                "are compiled for it without being told"
            )
        sms.append(int(match[1]))
        if sms[-1] < MIN_SM:
            raise ConfigError(f"--arch {name}: the kernels need sm_{MIN_SM} or newer")
    return list(dict.fromkeys(sms))


def _present_sms() -> list[int]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    return sorted({major * 10 + minor for major, minor in found})


def _chosen(
    option: str, asked: tuple[str, ...] | None, known: list[str] | tuple[str, ...]
) -> list[str]:
    """Return what was asked for, or all that is known."""
    for name in asked or ():
        if name not in known:
            raise ConfigError(f"{option} {name!r} is not known; known: {', '.join(known)}")
    return list(dict.fromkeys(asked or known))
