"""A GGUF file's header: metadata, and where each tensor lies.

Read here and not by `gguf.GGUFReader`, which takes seconds for a large vocabulary and trusts the
counts and lengths of a damaged file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tvr.core.gguf.cursor import Cursor, Value
from tvr.core.gguf.library import NumberFormat, number_format
from tvr.core.text_files import LFS_MAGIC
from tvr.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"GGUF"

_VERSIONS = (2, 3)  # they differ in nothing that is read here
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
# Fewest bytes of an entry: a name's length, a type, a one-byte value; name, dims, type, offset.
_MIN_FIELD_BYTES, _MIN_TENSOR_BYTES = 13, 24


class GGUFTensor(NamedTuple):
    """A tensor; `shape` is in torch's order, outermost first."""

    shape: tuple[int, ...]
    format: NumberFormat
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """An open GGUF file.

    Attributes:
        path: of the file, for messages.
        metadata: its key-value pairs.
        tensors: by GGUF's names.
    """

    path: Path
    metadata: dict[str, Value]
    tensors: dict[str, GGUFTensor]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Read the header of `path`. Of the tensors, only where they lie in the file is checked.

        Raises:
            CheckpointError: not a GGUF file, of a version or byte order that is not read,
                truncated or damaged.
            ConfigError: the gguf package is not installed.
        """
        try:
            with path.open("rb") as f:
                _check_start(path, f.read(len(LFS_MAGIC)))
                data = memoryview(mmap(f.fileno(), 0, access=ACCESS_READ))
        except OSError as e:
            raise CheckpointError(f"{path} cannot be read: {e}") from e
        cursor = Cursor(data, path)
        cursor.take(8, "the header")  # checked above
        num_tensors = cursor.count(_MIN_TENSOR_BYTES, "tensors")
        num_fields = cursor.count(_MIN_FIELD_BYTES, "metadata fields")
        metadata = _read_metadata(cursor, num_fields)
        tensors = _read_tensors(cursor, num_tensors, path)
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            cursor.refuse(f"general.alignment is {alignment!r}")
        start = -(-cursor.position // alignment) * alignment
        tensors = {name: t._replace(offset=start + t.offset) for name, t in tensors.items()}
        for name, tensor in tensors.items():
            end = tensor.offset + tensor.num_bytes
            if end > len(data):
                raise CheckpointError(
                    f"{path} is truncated: tensor {name} ends at byte {end:,}, the file has "
                    f"{len(data):,}; download it again"
                )
            if tensor.offset % alignment:
                cursor.refuse(
                    f"tensor {name} begins at byte {tensor.offset:,}, which is no multiple of "
                    f"general.alignment {alignment}"
                )
        return cls(path=path, metadata=metadata, tensors=tensors)

    def rows(self, name: str) -> NDArray[np.uint8]:
        """Return the stored bytes of a tensor, [num_rows, bytes of a row]; 1-D is one row.

        They are mapped anew at each call: pages of a mapping count as this process's memory until
        it ends, and those of the whole file would be a second copy of the model.
        """
        tensor = self.tensors[name]
        num_rows = math.prod(tensor.shape[:-1])
        shape = (num_rows, tensor.num_bytes // num_rows)
        return np.memmap(self.path, np.uint8, "r", offset=tensor.offset, shape=shape)


def _check_start(path: Path, start: bytes) -> None:
    if start == LFS_MAGIC.encode():
        raise CheckpointError(f"{path} is a Git LFS pointer, not the model; run `git lfs pull`")
    if start[:4] != MAGIC or len(start) < len(LFS_MAGIC):
        found = f"begins with {start[:4]!r}" if start[:4] != MAGIC else f"has {len(start)} bytes"
        raise CheckpointError(f"{path} is not a GGUF file: it {found}; download it again")
    version = int.from_bytes(start[4:8], "little")
    if version & 0xFFFF == 0:
        raise CheckpointError(
            f"{path} is a big-endian GGUF file; only little-endian ones are read: convert it with "
            "gguf-convert-endian"
        )
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{path} is a GGUF file of version {version}; versions "
            f"{' and '.join(map(str, _VERSIONS))} are read: convert it with a current llama.cpp"
        )


def _read_metadata(cursor: Cursor, num_fields: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for idx in range(num_fields):
        key = cursor.name(f"the name of metadata field {idx}")
        if key in metadata:
            cursor.refuse(f"metadata field {key} is there twice")
        metadata[key] = cursor.value(f"metadata field {key}")
    return metadata


def _read_tensors(cursor: Cursor, num_tensors: int, path: Path) -> dict[str, GGUFTensor]:
    """Return the tensors by name, with offsets from the start of the tensor data."""
    tensors: dict[str, GGUFTensor] = {}
    for idx in range(num_tensors):
        name = cursor.name(f"the name of tensor {idx}")
        if name in tensors:
            cursor.refuse(f"tensor {name} is there twice")
        what = f"the entry of tensor {name}"
        num_dims = cursor.integer(4, what)
        if not 1 <= num_dims <= _MAX_DIMS:
            cursor.refuse(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(cursor.integer(8, what) for _ in range(num_dims))[::-1]
        number = cursor.integer(4, what)
        fmt = number_format(number)
        if fmt is None:
            raise CheckpointError(
                f"{path}: tensor {name} is stored in format {number}, which the installed gguf "
                "package does not know; update it: pip install -U gguf"
            )
        if shape[-1] % fmt.block_len:
            cursor.refuse(
                f"tensor {name} has rows of {shape[-1]} numbers, which {fmt.name} cannot store"
            )
        num_bytes = math.prod(shape) // fmt.block_len * fmt.block_bytes
        tensors[name] = GGUFTensor(shape, fmt, cursor.integer(8, what), num_bytes)
    return tensors
