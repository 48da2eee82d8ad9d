"""Several child processes that share the units of one run."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType

from tvr.conformance.isolate import IsolatedSuite
from tvr.conformance.ledger import CheckResult
from tvr.conformance.suite import Unit
from tvr.conformance.task import Task
from tvr.errors import ConfigError

#: More children than this gain little on a CPU, where each holds torch.
MOST_DEFAULT_JOBS = 4


def default_jobs(device: str) -> int:
    """Return how many children a run gets: on a GPU one, whose memory it may need whole."""
    if not device.startswith("cpu"):
        return 1
    return min(num_cores(), MOST_DEFAULT_JOBS)


def num_cores() -> int:
    """Return the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity else os.cpu_count() or 1


class Crew:
    """`jobs` isolated suites over one backend, each driven by a thread.

    Use it as a context manager: no child outlives it.

    Args:
        task: what to test.
        jobs: number of children; each computes with its share of the cores.
        timeout: most seconds for a case.

    Attributes:
        facts: what the first child says of backend and device.

    Raises:
        TvrError: as `IsolatedSuite`.
    """

    def __init__(self, task: Task, *, jobs: int, timeout: float) -> None:
        if jobs < 1:
            raise ConfigError(f"conformance: {jobs} jobs; there must be at least one")
        if jobs > 1:
            task = replace(task, threads=max(1, num_cores() // jobs))
        self._task, self._jobs, self._timeout = task, jobs, timeout
        self._suites = [IsolatedSuite(task, timeout=timeout)]
        self._lock = threading.Lock()
        self._closed = False
        self.facts = self._suites[0].facts

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._closed = True
            for suite in self._suites:
                suite.close()

    def run(self, units: Sequence[Unit]) -> Iterator[tuple[Unit, list[CheckResult]]]:
        """Yield each unit and what became of its cases, in the order in which they end.

        Raises:
            TvrError: the suite refuses a unit, or a further child cannot be started.
        """
        waiting = deque(units)
        done: queue.SimpleQueue[tuple[Unit, list[CheckResult]] | Exception] = queue.SimpleQueue()
        for number in range(min(self._jobs, len(units))):
            threading.Thread(target=self._work, args=(number, waiting, done), daemon=True).start()
        for _ in units:
            ended = done.get()
            if isinstance(ended, Exception):
                raise ended
            yield ended

    def _work(
        self,
        number: int,
        waiting: deque[Unit],
        done: queue.SimpleQueue[tuple[Unit, list[CheckResult]] | Exception],
    ) -> None:
        """Take units and run them, until none is left."""
        try:
            suite = self._suites[0] if number == 0 else self._another()
            while suite is not None:
                try:
                    unit = waiting.popleft()
                except IndexError:
                    return
                done.put((unit, list(suite.run(unit))))
        except Exception as error:  # raised again where the results are awaited
            done.put(error)

    def _another(self) -> IsolatedSuite | None:
        """Start a further child; None: the crew has been closed meanwhile."""
        suite = IsolatedSuite(self._task, timeout=self._timeout)
        with self._lock:
            if not self._closed:
                self._suites.append(suite)
                return suite
        suite.close()
        return None
