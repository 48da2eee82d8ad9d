"""Reads the values of a GGUF header one after another, never past the end of the file."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NoReturn, TypeAlias

import numpy as np

from tvr.errors import CheckpointError

Scalar: TypeAlias = "int | float | bool | str"
Value: TypeAlias = "Scalar | list[Scalar]"

STRING, ARRAY, FLOAT32 = 8, 9, 6
#: GGUF's numbers of the scalar types -> their little-endian struct codes.
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
#: Fewest bytes of an array's element: a scalar's size, a string's length field.
_MIN_BYTES = {STRING: 8, **{kind: struct.calcsize(f"<{code}") for kind, code in _CODES.items()}}


class Cursor:
    """A place in a file. Every count and length is checked against the bytes that are left."""

    def __init__(self, data: memoryview, file: Path) -> None:
        """Start at the first of `data`'s bytes; `file` is named in errors."""
        self._data = data
        self._file = file
        self.position = 0

    def take(self, num_bytes: int, what: str) -> memoryview:
        """Return the next `num_bytes` bytes; raise CheckpointError if there are fewer."""
        end = self.position + num_bytes
        if end > len(self._data):
            raise CheckpointError(
                f"{self._file} is truncated or damaged: {what} ends at byte {end:,}, the file has "
                f"{len(self._data):,}; download it again"
            )
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def integer(self, num_bytes: int, what: str) -> int:
        """Return the next unsigned integer."""
        return int.from_bytes(self.take(num_bytes, what), "little")

    def count(self, min_bytes: int, what: str) -> int:
        """Return the next 64-bit count of things that take at least `min_bytes` each."""
        count = self.integer(8, what)
        left = len(self._data) - self.position
        if count * min_bytes > left:
            self.refuse(f"it states {count:,} {what}, and has {left:,} bytes left")
        return count

    def string(self, what: str) -> str:
        """Return the next string."""
        raw = self.take(self.integer(8, what), what)
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as e:
            self.refuse(f"{what} is not UTF-8 ({e})")

    def name(self, what: str) -> str:
        """Return the next string, a name: one that can stand in a message."""
        name = self.string(what)
        if not name.isprintable():
            self.refuse(f"{what} is {name[:80]!r}")
        return name

    def value(self, what: str) -> Value:
        """Return the next typed value, an array as a list."""
        kind = self.integer(4, what)
        if kind == ARRAY:
            return self._array(what)
        return self._scalar(kind, what)

    def refuse(self, reason: str) -> NoReturn:
        """Raise a CheckpointError that names the file."""
        raise CheckpointError(f"{self._file} is damaged: {reason}; download it again")

    def _scalar(self, kind: int, what: str) -> Scalar:
        if kind == STRING:
            return self.string(what)
        code = self._code(kind, what)
        value: Scalar
        (value,) = struct.unpack(f"<{code}", self.take(_MIN_BYTES[kind], what))
        # The decimal that was meant: a stored 1e-5 is 9.9999997e-06 when widened.
        return float(str(np.float32(value))) if kind == FLOAT32 else value

    def _array(self, what: str) -> list[Scalar]:
        kind = self.integer(4, what)
        if kind == STRING:
            return [self.string(what) for _ in range(self.count(8, what))]
        code = self._code(kind, what)
        count = self.count(_MIN_BYTES[kind], what)
        return list(struct.unpack(f"<{count}{code}", self.take(count * _MIN_BYTES[kind], what)))

    def _code(self, kind: int, what: str) -> str:
        if kind not in _CODES:
            self.refuse(f"{what} has type {kind}, which GGUF does not have there")
        return _CODES[kind]
