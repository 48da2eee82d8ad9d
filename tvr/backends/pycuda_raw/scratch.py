"""Folders in which kernels are compiled, beside the cache's files, and what killed compilers left.

A folder holds a file that its process keeps locked. The system lets go of a lock when a process
ends, however it ends, so a folder whose lock is free was left. A process id would not do: a cache
may be shared by containers, which do not see each other's processes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

PREFIX = ".compiling-"
_LOCK = "lock"


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder in `parent`, removed afterwards; what killed processes left goes too.

    Raises:
        OSError: it cannot be made.
    """
    remove_left(parent)
    folder, lock = _new(parent)
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)  # what stays now goes another time


def remove_left(parent: Path) -> int:
    """Remove the folders in `parent` that killed processes left; return their files' bytes.

    Another user's stay, and all of them where the file system has no locks.
    """
    size = 0
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # not ours, no locks, or on its way out by its own process
            lock = _lock(folder, wait=False)
            if lock is None:
                continue
            try:
                size += sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
    return size


def _new(parent: Path) -> tuple[Path, int]:
    """Return a new folder and the descriptor that keeps its lock."""
    while True:
        folder = Path(mkdtemp(prefix=PREFIX, dir=parent))
        try:
            lock = _lock(folder, wait=True)
        except OSError:  # no locks here; the file stays open all the same
            return folder, os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        # None: another process took the folder for one that was left before it had its lock.
        if lock is not None:
            return folder, lock


def _lock(folder: Path, *, wait: bool) -> int | None:
    """Return a descriptor that keeps the folder's lock; None: another has it, or it is gone.

    Raises:
        OSError: another user's folder, or a file system without locks.
    """
    import fcntl  # not on Windows, where the backend is imported to say that it cannot run

    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        # Whoever had the lock before may have removed the folder.
        if os.path.samestat(os.fstat(lock), os.stat(folder / _LOCK)):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None
