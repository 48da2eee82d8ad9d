"""Text and JSON files of a checkpoint directory. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tvr.errors import CheckpointError

#: What a file begins with whose content Git LFS has not fetched.
LFS_MAGIC = "version https://git-lfs"


def read_text(file: Path) -> str:
    """Return the text of `file`.

    Raises:
        CheckpointError: it is missing, not downloaded, not readable or not UTF-8.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as e:
        raise CheckpointError(
            f"{file} does not exist{dangling(file)}; give a whole Hugging Face model directory"
        ) from e
    except (OSError, UnicodeDecodeError) as e:
        raise CheckpointError(f"{file} cannot be read as text: {e}") from e
    if text.startswith(LFS_MAGIC):
        raise CheckpointError(f"{file} is a Git LFS pointer, not the file; run `git lfs pull`")
    return text


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`.

    Raises:
        CheckpointError: as for `read_text`, or it is not a JSON object.
    """
    try:
        data = json.loads(read_text(file))
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{file} is not valid JSON: {e}") from e
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} holds a JSON {type(data).__name__}, not an object")
    return data


def is_there(file: Path) -> bool:
    """Return whether a file that a checkpoint may leave out is there.

    Raises:
        CheckpointError: it is a link that leads nowhere; what it says is wanted and lost.
    """
    if file.is_symlink() and not file.exists():
        raise CheckpointError(f"{file} cannot be opened{dangling(file)}; download it again")
    return file.is_file()


def dangling(file: Path) -> str:
    """Return what a link that leads nowhere points at, as the tail of a message."""
    return f" (a link to {file.readlink()}, which does not exist)" if file.is_symlink() else ""
