"""One client's request while it is served: its prompts' outputs come in here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from tvr.serve.admission import Admission
from tvr.serve.deltas import Delivery, merged
from tvr.serve.errors import ApiError


class Job:
    """A request to the server, which is one or more to the engine.

    Belongs to the event loop, but for `claim`, `submitted` and what never changes.

    Attributes:
        job_id: a name no other one has.
        arrived: when the request came, in seconds of `time.monotonic()`.
        streams: each step's output is wanted; False: all of it at the end.
        has_logprobs: they are asked for, and answers are large.
        echoes: answers begin with the prompt, and may be large.
        may_forbid: it allows or forbids tokens, so that none may be left.
        closed: nobody waits for it any more.
    """

    def __init__(
        self,
        job_id: str,
        arrived: float,
        admission: Admission,
        abort: Callable[[str], None],
        on_close: Callable[[Job], None],
    ) -> None:
        """Take on one sequence, as there will be one at least.

        Args:
            admission: counts its sequences.
            abort: ends a request to the engine.
            on_close: called once, when it is closed.

        Raises:
            ApiError: 429, there is no room.
        """
        admission.take(1)
        self.job_id = job_id
        self.arrived = arrived
        self.streams = False
        self.has_logprobs = False
        self.echoes = False
        self.may_forbid = False
        self.closed = False
        self._admission = admission
        self._abort = abort
        self._on_close = on_close
        self._held = 1  # sequences that count
        self._lock = threading.Lock()  # a client may leave while another thread claims
        self._answers_each = 1
        self._request_ids: list[str] = []  # by prompt
        self._finished: set[int] = set()
        self._deliveries: list[Delivery] = []
        self._failure: ApiError | None = None
        self._wake = asyncio.Event()

    def claim(self, num_prompts: int, answers_each: int) -> None:
        """Say how many sequences it has. May be called from any thread.

        Raises:
            ApiError: there is no room for them.
        """
        num = num_prompts * answers_each
        with self._lock:
            if not self.closed:
                self._admission.take(num, self._held)
                self._held, self._answers_each = num, answers_each

    def submitted(self, request_id: str) -> None:
        """Note that the next prompt is with the engine. May be called from any thread."""
        self._request_ids.append(request_id)
        if self.closed:  # meanwhile; `close` may have come too early to know of it
            self._abort(request_id)

    @property
    def is_over(self) -> bool:
        """Whether every prompt's output has come and been taken."""
        return len(self._finished) == len(self._request_ids) and not self._deliveries

    def put(self, delivery: Delivery) -> None:
        """Take in what a step brought."""
        if delivery.finished:
            self._finished.add(delivery.prompt)
            self._give_back(self._answers_each)
        self._deliveries.append(delivery)
        self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Let `take` raise `error` behind what is there: what is still to come will not."""
        self._failure = error
        self._wake.set()

    async def take(self) -> list[Delivery]:
        """Wait for the next output and return all that is there, of each answer as one delta.

        Raises:
            ApiError: the job has failed.
        """
        await self._wake.wait()
        if self._failure is None:
            self._wake.clear()
        elif not self._deliveries:
            raise self._failure
        taken, self._deliveries = self._deliveries, []
        return taken if len(taken) < 2 else merged(taken)

    def close(self) -> None:
        """End what is unfinished: the client has its answer, or has gone."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
        for prompt, request_id in enumerate(list(self._request_ids)):
            if prompt not in self._finished:
                self._abort(request_id)
        self._give_back(self._held)
        self._deliveries.clear()
        self._on_close(self)

    def _give_back(self, num: int) -> None:
        num = min(num, self._held)  # none, if it is closed
        self._held -= num
        self._admission.give_back(num)
