"""Finding installed backends: the entry points of `tvr.backends.v<major>`, none imported yet."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, distributions

from tvr.core.plugin_checks import describe
from tvr.errors import PluginLoadError

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

    @property
    def is_built_in(self) -> bool:
        """Whether it comes with tvr."""
        return self.entry_point.value.startswith("tvr.backends.")

    def load(self) -> object:
        """Import what the entry point names; whatever that raises, it raises.

        Raises:
            PluginLoadError: it names nothing that could be imported.
        """
        if EntryPoint.pattern.match(self.entry_point.value) is None:
            raise PluginLoadError(
                f"the entry point names {self.entry_point.value!r}; it must be 'module' or "
                "'module:attribute'"
            )
        return self.entry_point.load()

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
                where = os.path.realpath(str(getattr(dist, "_path", None) or dist.locate_file("")))
                note = f"{where}: unreadable metadata: {describe(e)}"
                if note not in found.notes:  # seen twice if its folder is on the path twice
                    found.notes.append(note)
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
