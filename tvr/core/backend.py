"""One backend as the engine knows it: usable, or with the reasons why it is not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvr.contract import BackendInfo
from tvr.core.plugin_checks import Plugin, describe

OK = "ok"
UNAVAILABLE = "unavailable"  # loaded, but its probe says it cannot run here
FAILED = "failed"  # could not be loaded, or breaks the contract
DISABLED = "disabled"
NOT_INSTALLED = "not installed"
NOT_LISTED = "not listed"  # could run, but neither the order nor a pin names it


@dataclass
class Backend:
    """A backend that is installed, given or named, usable or not.

    Attributes:
        name: as in `--backend` and plugins.toml.
        distribution, version: what it was installed from; None: given or not installed.
        plugin: its checked hooks; None unless it was loaded.
        status: one of the words above.
        reasons: why it is not `OK`.
        notes: what is worth knowing but stops nothing.
        error: the exception behind `reasons`, for a traceback.
    """

    name: str
    status: str
    distribution: str | None = None
    version: str | None = None
    plugin: Plugin | None = None
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def info(self) -> BackendInfo:
        """What it declares; only for a backend that was loaded."""
        assert self.plugin is not None
        return self.plugin.info

    def call(self, hook: str, **arguments: object) -> Any:  # noqa: ANN401
        """Call this backend's own `hook`; None if it has none."""
        return self.plugin.call(hook, **arguments) if self.plugin else None

    def why_not_used(self) -> list[str]:
        """Return why it cannot serve anything; empty: it can."""
        return [] if self.status == OK else self.reasons

    def fail(self, error: BaseException) -> None:
        """Note that it could not be loaded, and why."""
        self.status, self.error = FAILED, error
        self.reasons = [f"failed to load: {describe(error)}"]
