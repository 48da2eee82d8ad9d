"""What the commands print: answers on stdout, remarks on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path

from tvr.errors import ConfigError


def remark(message: str) -> None:
    """Print one line on stderr."""
    print(f"tvr: {' '.join(message.split())}", file=sys.stderr, flush=True)


def columns(rows: Sequence[Sequence[str]], *, right: Container[int] = ()) -> list[str]:
    """Return a line for each row, cells of a column under each other; those of `right` end alike.

    All rows have as many cells.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def text_writer() -> Callable[[str], None]:
    """Return a function that writes text to stdout at once, whatever stdout can encode."""
    if sys.stdout is None:
        raise ConfigError("stdout is closed; there is nowhere to write the answer")
    encoding = sys.stdout.encoding or "utf-8"

    def write(text: str) -> None:
        # A narrow terminal encoding must not end the answer: what it lacks becomes '?'.
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()

    return write


def check_can_write(reports: dict[str, Path | None]) -> None:
    """See that the reports, by their options, can be written, before the work."""
    files = {option: file for option, file in reports.items() if file is not None}
    if len({file.absolute() for file in files.values()}) < len(files):
        name = next(iter(files.values()))
        raise ConfigError(f"{' and '.join(files)} both name {name}; give each a file of its own")
    for option, file in files.items():
        if str(file) == "-":
            raise ConfigError(f"{option} - names no file, and stdout has the table; name a file")
        if file.is_dir():
            raise ConfigError(f"{option} {file} is a folder; name a file in it")
        if not file.parent.is_dir():
            raise ConfigError(f"{option} {file}: there is no folder {file.parent}")
        try:
            is_new = not file.exists()
            if is_new or file.is_file():  # a pipe would end
                file.open("ab").close()
            if is_new:
                file.unlink()
        except OSError as e:
            raise ConfigError(f"{option} {file} cannot be written: {e.strerror}") from e
