"""The machine's memory, and sizes as people read them. Without torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

GIB = 1 << 30


def shown_bytes(num_bytes: int) -> str:
    """Return a size as people read it: in GiB, or in MiB where that would round to nothing."""
    unit, name = (GIB, "GiB") if num_bytes >= GIB / 10 else (GIB / 1024, "MiB")
    return f"{num_bytes / unit:.2f} {name}"


def available_cpu_bytes() -> int:
    """Return the bytes of memory that could be taken, or 8 GiB where the system does not say."""
    # What Linux calls free leaves out the files it caches, and so all but nothing may be free.
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        (available,) = (line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return 8 * GIB
