"""What to test, as plain data, and loading it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tvr.conformance.selection import Selection
from tvr.conformance.subject import Subject, device_facts
from tvr.conformance.suite_run import Facts, facts_of
from tvr.core.plugins import BackendManager, PluginConfig


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to test, and where.

    Attributes:
        backend: name of an installed backend.
        device: torch's name of the device.
        plugins: path of a plugins.toml; None: the packaged one.
        selection: what of the suite is run.
        threads: threads that torch computes with on the CPU; None: as many as it likes.
    """

    backend: str
    device: str
    plugins: str | None
    selection: Selection
    threads: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return this as what JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Task:
        """Return the task that `as_json` gave; JSON has made lists of its tuples."""
        selection: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in data["selection"].items()
        }
        return cls(**{**data, "selection": Selection(**selection)})

    def load(self) -> tuple[Subject, Facts]:
        """Load the backend into this process.

        Raises:
            TvrError: it cannot be tested here; says why.
        """
        device = device_facts(self.device)
        backend = BackendManager(PluginConfig.load(self.plugins), device=device).require(
            self.backend
        )
        subject = Subject(backend, device)
        facts = facts_of(
            subject.info, device, distribution=backend.distribution, version=backend.version
        )
        return subject, facts
