"""Options that the commands of `tvr bench` share, and checks of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvr.errors import CapacityError, ConfigError

#: Of a list of ids: a place in the list, and a number of its own.
_BYTES_OF_A_TOKEN = 36

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


def refuse_too_many(num_prompts: int, input_len: int) -> None:
    """Raise CapacityError, before the first prompt is made, if they do not fit into memory."""
    from tvr.core.host_memory import available_cpu_bytes, shown_bytes

    needed, available = num_prompts * input_len * _BYTES_OF_A_TOKEN, available_cpu_bytes()
    if needed > available:
        raise CapacityError(
            f"{num_prompts} prompts of {input_len} tokens take {shown_bytes(needed)}, and "
            f"{shown_bytes(available)} of memory are free; ask for fewer or shorter ones"
        )
