"""Progress bars: on stderr, and only where it is a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

#: Loads that are over sooner show no bar.
PATIENCE_S = 1.0


@contextmanager
def loading_bar() -> Iterator[Callable[[int, int], None] | None]:
    """Yield what to call with bytes read and bytes in all; None: nobody would see a bar.

    It also tells what backends log meanwhile: the kernels that they compile.
    """
    if not _is_terminal():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    bar = _bar(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    )
    task = bar.add_task("loading", total=None)
    began: float | None = None
    shown = False

    def show(**changes: Any) -> None:  # noqa: ANN401
        nonlocal began, shown
        began = time.monotonic() if began is None else began
        bar.update(task, **changes)
        if not shown and time.monotonic() - began >= PATIENCE_S:
            shown = True
            bar.start()

    log, handler = logging.getLogger("tvr"), _Told(lambda message: show(description=message))
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lambda done, total: show(completed=done, total=total)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
        if shown:
            bar.stop()


class _Told(logging.Handler):
    """Passes on the messages of a logger."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


@contextmanager
def batch_bar(total: int, done: int) -> Iterator[Callable[[int, int], None]]:
    """Yield what to call with lines done and tokens made so far."""
    if not _is_terminal():
        yield lambda done, tokens: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    began = time.monotonic()
    bar = _bar(
        BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    )
    task = bar.add_task("", total=total, completed=done)

    def report(done: int, tokens: int) -> None:
        speed = tokens / max(time.monotonic() - began, 1e-3)
        bar.update(task, completed=done, description=f"{speed:.0f} tokens/s")

    with bar:
        yield report


@contextmanager
def suite_bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """Yield what to call with the checks done so far and what is being done."""
    if not _is_terminal():
        yield lambda done, doing: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    bar = _bar(
        BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    )
    task = bar.add_task("", total=total)
    with bar:
        yield lambda done, doing: bar.update(task, completed=done, description=doing)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _bar(*columns: object) -> Progress:
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True), transient=True)  # type: ignore[arg-type]
