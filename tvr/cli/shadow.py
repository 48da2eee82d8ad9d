"""`tvr run --shadow`: a model runs beside a reference until one of its ops is wrong."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tvr.cli.exits import EXIT_FAILED
from tvr.cli.output import remark
from tvr.errors import ConfigError, OpFault

if TYPE_CHECKING:
    from tvr.conformance.shadow import Shadow


def open_shadow(
    reference: str | None, file: Path | None, *, backend: str, plugins: str | None
) -> Shadow | None:
    """Return what compares `backend` with `reference`; None: nobody asked for it.

    Raises:
        ConfigError: the options do not go together, or the file cannot be made.
    """
    if reference is None:
        if file is not None:
            raise ConfigError("--shadow-file needs --shadow NAME, the backend to compare with")
        return None
    if backend == "auto":
        raise ConfigError("--shadow needs --backend NAME, the backend whose ops are to be compared")
    if backend == reference:
        raise ConfigError(f"--shadow and --backend are both {backend!r}; name two backends")
    if file is not None and file.is_dir():
        raise ConfigError(f"--shadow-file {file} is a folder; name a file in it")
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"--shadow-file {file}: there is no folder {file.parent}")
    from tvr.conformance.shadow import Shadow

    more = "" if plugins is None else f" --plugins {shlex.quote(plugins)}"
    return Shadow(reference, file=file, replay_options=more)


@contextmanager
def shadowed(shadow: Shadow | None, backend: str) -> Iterator[None]:
    """Run a model inside; afterwards say on stderr what `shadow` found.

    Raises:
        typer.Exit: with `EXIT_FAILED`; an op is wrong, and stderr says which.
        ConfigError: nothing of `backend` was compared.
    """
    try:
        yield
    except OpFault as fault:
        remark(str(fault))
        raise typer.Exit(EXIT_FAILED) from fault
    if shadow is not None:
        remark(f"shadow: {shadow.summary(backend)}")
