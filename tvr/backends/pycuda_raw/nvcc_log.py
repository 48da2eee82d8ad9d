"""What nvcc prints: the resources a kernel takes, warnings, and the first error."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
# ptxas tells of a wgmma that must wait for itself in a line that is no warning by name.
_WARNING = re.compile(r"^.*(?:\bwarning(?: #\S+)?\s*: |Potential Performance Loss).*$", re.M)
# The compiler's front end has file(line), its preprocessor file:line:column.
_ERROR_AT = re.compile(
    r"^(?P<file>\S.*?)(?:\((?P<line>\d+)\)|:(?P<at>\d+)(?::\d+)?): "
    r"(?:fatal |catastrophic |internal )?error[^:]*: (?P<text>.+)$",
    re.M,
)
_ERROR = re.compile(r"^.*\b(?:error|fatal)\s*: .+$", re.M)


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes.

    Attributes:
        registers: of a thread.
        shared_bytes: static shared memory of a block; what a launch adds is not known here.
        stack_bytes: of a thread, in local memory.
        spill_store_bytes: registers written to local memory, for want of registers.
        spill_load_bytes: and read back.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def spill_bytes(self) -> int:
        """Bytes spilled, either way."""
        return self.spill_store_bytes + self.spill_load_bytes


def read_resources(log: str) -> Resources | None:
    """Return the resources that `ptxas -v` printed; None: it printed none.

    Functions that were not inlined print a stack and spills of their own; those are added up.
    """
    registers = _REGISTERS.findall(log)
    if not registers:
        return None
    stack, stores, loads = (
        sum(map(int, column)) for column in zip(*_STACK.findall(log), strict=True)
    )
    shared = max(map(int, _SHARED.findall(log)), default=0)
    return Resources(max(map(int, registers)), shared, stack, stores, loads)


def read_warnings(log: str, source_dir: Path) -> tuple[str, ...]:
    """Return the warnings, a line each; files in `source_dir` are named without their folder."""
    lines = (" ".join(line.split()) for line in _WARNING.findall(log))
    return tuple(dict.fromkeys(line.replace(f"{source_dir}{os.sep}", "") for line in lines))


def first_error(log: str, source_dir: Path) -> str | None:
    """Return the first error as `file:line: error: text`, or as it stands if it names no line.

    Files in `source_dir` are named without their folder.
    """
    first = _ERROR.search(log)
    placed = _ERROR_AT.search(log)
    if placed is not None and first is not None and placed.start() <= first.start():
        file = Path(placed["file"])
        name = file.relative_to(source_dir) if file.is_relative_to(source_dir) else file
        return f"{name}:{placed['line'] or placed['at']}: error: {placed['text'].strip()}"
    return " ".join(first[0].split()) if first else None
