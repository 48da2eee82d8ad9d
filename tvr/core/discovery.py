"""Finding installed backends: the entry points of `tvr.backends.v<major>`, none imported yet."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, distributions

_GROUP = re.compile(r"tvr\.backends\.v(\d+)")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An entry point that names a backend, and the distribution it came from."""

    entry_point: EntryPoint
    major: int
    distribution: str
    version: str

    @property
    def name(self) -> str:
        """Name of the backend: that of the entry point."""
        return self.entry_point.name

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.entry_point.value})"


@dataclass(frozen=True)
class Discovery:
    """What is installed, in the order of `sys.path`, and what could not be read."""

    candidates: list[Candidate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def discover(installed: Iterable[Distribution] | None = None) -> Discovery:
    """Return the backends that `installed` (None: everything on `sys.path`) declare.

    A distribution found twice counts once, and the first on `sys.path` wins, as for imports: in
    many virtual environments lib64 is a link to lib and both are on the path.
    """
    found = Discovery()
    seen: set[str] = set()
    for dist in distributions() if installed is None else installed:
        entry_points = None
        try:
            entry_points = [ep for ep in dist.entry_points if _GROUP.fullmatch(ep.group)]
            name, version = dist.metadata["Name"] or "unknown", dist.version or "unknown"
        except Exception as e:  # a damaged distribution must not take the others with it
            if entry_points != []:  # one that has no backend is none of our business
                found.notes.append(f"{dist.locate_file('')}: unreadable metadata: {e!r}")
            continue
        # A first copy without backends shadows the backends of a second too.
        normalized = re.sub(r"[-_.]+", "-", name).lower()
        if normalized in seen:
            continue
        seen.add(normalized)
        found.candidates.extend(
            Candidate(
                entry_point=ep,
                major=int(ep.group.rpartition("v")[2]),
                distribution=name,
                version=version,
            )
            for ep in dict.fromkeys(entry_points)
        )
    return found
