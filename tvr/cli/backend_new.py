"""`tvr backend new`: write a package with a backend of one's own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvr.errors import ConfigError

if TYPE_CHECKING:
    from tvr.scaffold import Package

app = typer.Typer()


@app.callback(invoke_without_command=True)
def backend(context: typer.Context) -> None:
    """Write a backend of your own."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(short_help="Write a package with a working backend.")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What --backend will call it.")],
    *,
    ops: Annotated[
        str,
        typer.Option(metavar="OP,OP,...", help="Ops that it serves, or all."),
    ] = "rms_norm",
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Folder to put the package in.")
    ] = Path("."),
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    """Write the package tvr-NAME, whose ops work and pass the conformance suite as they stand."""
    from tvr.contract import OPS
    from tvr.scaffold import Package

    asked = tuple(op.strip() for op in ops.split(","))
    package = Package(name, OPS if asked == ("all",) else asked)
    _refuse_taken(package)
    written = package.write(folder)
    typer.echo(f"wrote {written}, which serves {', '.join(package.ops)}. Next:")
    # Its extra brings what the conformance suite needs beside tvr.
    typer.echo(f"  pip install -e {shlex.quote(os.path.join(os.curdir, written) + '[test]')}")
    typer.echo(f"  tvr conformance --backend {name}")
    typer.echo(f'  tvr run "ROMEO:" --backend {name}')


def _refuse_taken(package: Package) -> None:
    """Refuse the name of another backend or package: tvr or Python would see only one of two."""
    from tvr.core.discovery import discover

    for candidate in discover().candidates:
        if candidate.name == package.name:
            raise ConfigError(f"backend {package.name!r} is installed already, by {candidate}")
    # Also finds a name that differs only in "-", "_" and ".", as pip does.
    for taken in importlib.metadata.distributions(name=package.distribution):
        raise ConfigError(
            f"a package {taken.metadata['Name']} is installed already; take another name than "
            f"{package.name!r}"
        )
    if importlib.util.find_spec(package.module) is not None:
        raise ConfigError(
            f"a Python package {package.module} is installed already; take another name than "
            f"{package.name!r}"
        )
