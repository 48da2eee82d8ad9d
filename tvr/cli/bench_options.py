"""Options that the commands of `tvr bench` share, and checks of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvr.errors import ConfigError

Backends = Annotated[
    list[str] | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="Measure this one; several with commas or given again. Default: all that can run.",
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON.")
]


def numbers(option: str, text: str) -> list[int]:
    """Return the numbers of "64,128".

    Raises:
        ConfigError: it is no such list.
    """
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{option} {text!r} is no list of whole numbers above 0, as in 64,128")
    return found


def whole(option: str, value: int, least: int) -> None:
    """Raise ConfigError if an option's number is below `least`."""
    if value < least:
        raise ConfigError(f"{option} is {value}; it must be at least {least}")
