"""The child process of an isolated run: it runs checks and tells of each case before it begins.

Commands and events are JSON objects, a line each, over two pipes whose numbers are its arguments:
stdout and stderr are the backend's, to print what it likes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any, TextIO

import torch

from tvr.conformance.suite import Unit, run_unit
from tvr.conformance.task import Task
from tvr.errors import TvrError


def main() -> None:
    """Run the units that come over the pipe `argv[1]`, and tell of them over `argv[2]`."""
    faulthandler.enable(all_threads=False)  # a segmentation fault says where it was
    # It would keep notes of the modules it reads in a folder `.hypothesis`, wherever one works.
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.devnull)
    commands, events = (int(number) for number in sys.argv[1:3])
    for pipe in (commands, events):
        os.set_inheritable(pipe, False)  # a compiler that is started must not keep them open
    received: SimpleQueue[dict[str, Any]] = SimpleQueue()
    threading.Thread(target=_receive, args=(commands, received), daemon=True).start()
    with open(events, "w", encoding="utf-8") as stream:
        teller = _Teller(stream)
        try:
            _serve(received, teller)
        except TvrError as error:
            teller.tell(refused=str(error), error=type(error).__name__)
    # Threads and exit hooks of a backend are no longer of interest, and may hang.
    os._exit(0)


def _receive(commands: int, received: SimpleQueue[dict[str, Any]]) -> None:
    """Queue what the parent sends; end this process when the parent is gone, whatever it does."""
    with open(commands, encoding="utf-8") as stream:
        for line in stream:
            received.put(json.loads(line))
    os._exit(1)


def _serve(received: SimpleQueue[dict[str, Any]], parent: _Teller) -> None:
    task = Task.from_json(received.get())
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    subject, facts = task.load()
    parent.tell(ready=asdict(facts))
    while True:
        asked = received.get()
        unit = Unit(asked["op"], asked["check"])
        for result in run_unit(
            subject,
            unit,
            task.selection,
            skip=asked["skip"],
            on_begin=lambda case: parent.tell(begin=case),
        ):
            is_lost = result.failed and not subject.answers()
            parent.tell(result=asdict(result))
            if is_lost:
                # After such an error every later call of this process fails too.
                parent.tell(lost=True)
                return
        parent.tell(done=True)


class _Teller:
    """Tells the parent of events, and how much had been printed by then."""

    def __init__(self, events: TextIO) -> None:
        self._events = events
        self._printed = os.dup(1)  # before a backend may close it

    def tell(self, **event: object) -> None:
        printed = os.fstat(self._printed).st_size
        self._events.write(json.dumps({**event, "printed": printed}) + "\n")
        self._events.flush()


if __name__ == "__main__":
    main()
