"""What nvcc prints: the kernels it found, the resources they take, warnings and errors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
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
_PTX_MESSAGE = re.compile(
    r"^ptxas (?P<file>.+), line (?P<line>\d+); (?P<kind>\w+)\s*: (?P<text>.+)$", re.M
)
# In PTX: `.loc 2 41 3` says that what follows is line 41 of the file that `.file 2 "..."` names.
_PTX_PLACE = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_PTX_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.M)
_PTX_REGISTER = re.compile(r"(%[a-z]+)\d+")
# What is said of every kernel, or of nothing that is wrong.
_NOISE = re.compile(
    r"ptxas info|Remark: |In file included from |ptxas fatal\s*: Ptx assembly aborted"
    r"|\d+ (?:catastrophic )?errors? detected in "
)


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


def read_kernels(log: str) -> list[str]:
    """Return the names of the kernels that `ptxas -v` told of."""
    return _ENTRY.findall(log)


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


def place_ptx_messages(log: str) -> str:
    """Return `log` with what ptxas says placed in the source, as the front end places its own.

    It names a line of a temporary file: inline assembly as the compiler wrote it out. That file
    must still be there, compiled with `-lineinfo`; else a message stays as it is.
    """
    return _PTX_MESSAGE.sub(_placed, log)


def _placed(message: re.Match[str]) -> str:
    try:
        ptx = Path(message["file"]).read_text("utf-8", "replace")
    except OSError:
        return message[0]
    lines = ptx.split("\n")[: int(message["line"])]
    place = next(filter(None, map(_PTX_PLACE.match, reversed(lines))), None)
    file = None if place is None else dict(_PTX_FILE.findall(ptx)).get(place[1])
    if place is None or file is None:
        return message[0]
    kind = "warning" if message["kind"] == "warning" else "error"
    # Without the registers' numbers, so that kernels which share a header have the same message.
    instruction = _PTX_REGISTER.sub(r"\1", lines[-1].strip())
    return f"{file}({place[2]}): {kind}: ptxas: {message['text']} in `{instruction}`"


def read_messages(log: str) -> Iterator[tuple[str, str]]:
    """Yield what the compiler complains of, each by its first line, with all its lines.

    Equal first lines are the same complaint, whichever kernel was compiled.
    """
    # The lines that belong to the one before are indented, or empty.
    for message in re.split(r"\n(?=\S)", log.strip("\n")):
        if message and not _NOISE.match(message):
            yield message.partition("\n")[0], message.rstrip()


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
