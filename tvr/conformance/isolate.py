"""Running the suite in a child process, which a backend may crash, end or hang.

A child that dies or gives no answer costs the case it was in, which fails; a new child goes on
behind it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import TracebackType

from tvr.conformance.cases import cases
from tvr.conformance.child import Child, DeviceLost, Died
from tvr.conformance.ledger import FAILED, CheckResult
from tvr.conformance.suite import Unit
from tvr.conformance.suite_run import Facts
from tvr.conformance.task import Task
from tvr.errors import ConfigError, TvrError

#: Most seconds for a case, and for loading a backend: either may compile its kernels.
TIMEOUT_S = 300.0


class IsolatedSuite:
    """The suite over one backend, in a child process that is started again when it dies.

    Use it as a context manager: no child outlives it.

    Args:
        task: what to test.
        timeout: most seconds for a case.
        start_timeout: most seconds for a child to start and to load the backend.

    Attributes:
        facts: what the child says of backend and device.

    Raises:
        TvrError: as `Subject.installed`, raised in the child.
        BackendUnavailable: the child dies, or gives no answer, while it loads the backend.
    """

    def __init__(
        self, task: Task, *, timeout: float = TIMEOUT_S, start_timeout: float = TIMEOUT_S
    ) -> None:
        if os.name != "posix":
            raise ConfigError("conformance: a child process needs POSIX; use --in-process here")
        if not timeout > 0:
            raise ConfigError(f"conformance: a timeout of {timeout:g} s; it must be above 0")
        self._task = task
        self._timeout, self._start_timeout = timeout, start_timeout
        self._broken: str | None = None
        self._closed = False
        self._child = Child(task, timeout)
        try:
            self.facts: Facts = self._child.facts(self._start_timeout)
        except BaseException:
            self._child.kill()
            raise

    def __enter__(self) -> IsolatedSuite:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child, from whichever thread; a unit that runs then comes to nothing."""
        self._closed = True
        self._child.kill()

    def run(
        self, unit: Unit, on_begin: Callable[[str], None] = lambda handle: None
    ) -> Iterator[CheckResult]:
        """Yield what became of each case of `unit`, those that end the child included.

        Args:
            unit: the check to run, and on what.
            on_begin: called with the handle of a case before it is run.

        Raises:
            TvrError: the suite refuses the unit: no such case, no hypothesis.
        """
        num_results = 0
        while self._broken is None:
            try:
                for result in self._child.run(unit, num_results, on_begin):
                    num_results += 1
                    yield result
                return
            except DeviceLost:
                pass  # the case that lost it has failed already
            except Died as death:
                num_results += 1
                yield self._failure(unit, str(death), death.case, death.seconds)
            if self._closed:
                return
            self._start_again()
        yield self._failure(unit, f"not run to its end: {self._broken}")

    def _start_again(self) -> None:
        self._child.kill()
        self._child = Child(self._task, self._timeout)
        try:
            if self._closed:
                self._child.kill()
            self._child.facts(self._start_timeout)
        except TvrError as error:
            self._broken = f"no new process could be started: {error}"

    def _failure(
        self, unit: Unit, detail: str, handle: str = "", seconds: float = 0.0
    ) -> CheckResult:
        seed = self._task.selection.seed
        texts = {case.name: case.text for case in cases(unit.op, "full", seed)}
        return CheckResult(
            check=unit.check,
            op=unit.op,
            case=handle,
            outcome=FAILED,
            detail=detail,
            seconds=seconds,
            seed=seed,
            text=texts.get(handle, handle),  # a drawn case's handle is its text
        )
