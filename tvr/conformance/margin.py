"""How near a comparison came to its limit: kept while a check runs, for the report."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Margin:
    """The comparison that came nearest to its limit, or went furthest over it.

    Attributes:
        error, limit: of that comparison, in its own unit; None: nothing was compared.
    """

    error: float | None = None
    limit: float | None = None

    def note(self, error: float, limit: float) -> None:
        """Keep this comparison if none came nearer to its limit; a NaN error is over any."""
        if (
            self.error is None
            or self.limit is None
            or share(error, limit) > share(self.error, self.limit)
        ):
            self.error, self.limit = error, limit


def share(error: float, limit: float) -> float:
    """Return `error / limit`: above 1 is over it; a NaN, or anything over a limit of 0, is inf."""
    if error != error:
        return float("inf")
    if limit == 0:
        return float("inf") if error else 0.0
    return error / limit


# A judge is called deep inside a check, which knows nothing of reports.
_current: ContextVar[Margin | None] = ContextVar("margin", default=None)


@contextmanager
def measuring() -> Iterator[Margin]:
    """Collect in the yielded margin what is noted inside the context."""
    margin = Margin()
    token = _current.set(margin)
    try:
        yield margin
    finally:
        _current.reset(token)


def note(error: float, limit: float) -> None:
    """Note a comparison, if anybody measures."""
    if (margin := _current.get()) is not None:
        margin.note(error, limit)
