"""One child process that runs checks, seen from the process that started it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tvr.conformance.ledger import CheckResult
from tvr.conformance.suite import Unit
from tvr.conformance.suite_run import Facts
from tvr.conformance.task import Task
from tvr.errors import BackendUnavailable, ConfigError, PluginError, TvrError

# The child sees the packages that this process sees, and not what lies in the current folder.
_START = "import sys; sys.path[:] = sys.argv[3:]; from tvr.conformance import worker; worker.main()"
_POLL_S = 1.0
#: What the backend printed in a failed case is shown up to so many lines.
_MOST_LINES = 8
_MOST_BYTES = 1 << 16


class DeviceLost(Exception):
    """The child ended itself: after the failure it has told of, its device answers no more."""


class Died(Exception):
    """The child is gone, or gives no answer; the message says how, and what it printed.

    Attributes:
        case: handle of the case it was in; "": none.
        seconds: since that case began.
    """

    def __init__(self, reason: str, case: str, seconds: float) -> None:
        super().__init__(reason)
        self.case = case
        self.seconds = seconds


class Child:
    """A child process and the pipes to it; it ends when this process does.

    Args:
        task: what it is to test.
        timeout: most seconds for a case.
    """

    def __init__(self, task: Task, timeout: float) -> None:
        self._task = task
        self._timeout = timeout
        self._case = ""
        self._began = time.monotonic()
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115
        self._case_from = 0
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        their_commands, commands = os.pipe()
        events, their_events = os.pipe()
        self._commands = open(commands, "wb", buffering=0)  # noqa: SIM115
        numbers = [str(their_commands), str(their_events)]
        self._process = subprocess.Popen(
            # Unbuffered: what was printed before a crash counts most.
            [sys.executable, "-u", "-c", _START, *numbers, *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=self._printed,
            stderr=self._printed,
            pass_fds=(their_commands, their_events),
            # A group of its own: Ctrl-C is for this process, which then ends the whole group.
            start_new_session=True,
        )
        os.close(their_commands)
        os.close(their_events)
        threading.Thread(target=_collect, args=(events, self._events), daemon=True).start()
        self._send(task.as_json())

    def facts(self, timeout: float) -> Facts:
        """Wait until the backend is loaded, most `timeout` seconds, and return what it is.

        Raises:
            TvrError: it cannot be tested here.
        """
        try:
            found = self._next(timeout)["ready"]
        except Died as death:
            raise BackendUnavailable(
                f"backend {self._task.backend!r} cannot be tested: while it was loaded, {death}"
            ) from death
        return Facts(**found | {"declared": tuple(found["declared"])})

    def run(self, unit: Unit, skip: int, on_begin: Callable[[str], None]) -> Iterator[CheckResult]:
        """Yield what becomes of the cases of `unit`, without the first `skip`.

        Raises:
            Died: while it ran a case.
            DeviceLost: behind a failed case.
            TvrError: the suite refuses the unit.
        """
        self._send({"op": unit.op, "check": unit.check, "skip": skip})
        while True:
            match self._next(self._timeout):
                case {"begin": str(handle), "printed": int(printed)}:
                    self._begin(handle, printed)
                    on_begin(handle)
                case {"result": dict(values), "printed": int(printed)}:
                    result = CheckResult(**values)
                    if result.failed:
                        shown = self._what_it_printed(printed)
                        result = replace(result, detail=result.detail + shown)
                    self._begin("", printed)
                    yield result
                case {"lost": True}:
                    raise DeviceLost
                case {"done": True}:
                    return

    def kill(self) -> None:
        """End it, and all that it started; may be called again."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._commands.close()
        self._printed.close()

    def _begin(self, handle: str, printed: int) -> None:
        self._case, self._began, self._case_from = handle, time.monotonic(), printed

    def _send(self, command: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # it died; the next event says so
            self._commands.write(json.dumps(command).encode() + b"\n")

    def _next(self, timeout: float) -> dict[str, Any]:
        """Return the next event."""
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            try:
                event = self._events.get(timeout=min(_POLL_S, left))
            except queue.Empty:
                if self._process.poll() is None:
                    continue
                event = None  # something that it started holds the pipe open
            if event is None:
                raise self._died(self._how_it_ended())
            if "refused" in event:
                kinds = {
                    kind.__name__: kind for kind in (BackendUnavailable, ConfigError, PluginError)
                }
                raise kinds.get(event["error"], TvrError)(event["refused"])
            return event
        raise self._died(f"no answer in {timeout:g} s")

    def _died(self, reason: str) -> Died:
        seconds = time.monotonic() - self._began
        end = os.fstat(self._printed.fileno()).st_size
        return Died(reason + self._what_it_printed(end), self._case, seconds)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(timeout=_POLL_S)
        except subprocess.TimeoutExpired:
            return "the process closed the pipe to the suite"
        if code >= 0:
            return f"the process ended with exit code {code}"
        names = {number.value: number.name for number in signal.Signals}
        hint = " (as when memory runs out)" if -code == signal.SIGKILL else ""
        return f"the process died: {names.get(-code, f'signal {-code}')}{hint}"

    def _what_it_printed(self, end: int) -> str:
        """Return what the backend printed in this case, up to byte `end`, as lines of a message."""
        start = max(self._case_from, end - _MOST_BYTES)
        # Not by seek, which would move where the child writes.
        text = os.pread(self._printed.fileno(), end - start, start).decode(errors="replace")
        dump = text.find("Fatal Python error")
        lines = [line for line in text[max(dump, 0) :].splitlines() if line.strip()]
        # Of a dump the first lines tell where it was, of anything else the last.
        shown = lines[:_MOST_LINES] if dump >= 0 else lines[-_MOST_LINES:]
        return "".join(f"\n  {line[:200]}" for line in (["it printed:", *shown] if shown else []))


def _collect(events: int, into: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    """Queue what comes from the child, at last None: its end of the pipe is closed."""
    with open(events, encoding="utf-8") as stream:
        for line in stream:
            if not line.endswith("\n"):  # the child was ended while it wrote
                break
            into.put(json.loads(line))
    into.put(None)
