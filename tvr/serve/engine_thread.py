"""The thread that steps the engine, and hands outputs over to the event loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from tvr.core.llm import LLM
from tvr.core.prompt import Prompt
from tvr.core.sampling_params import SamplingParams
from tvr.serve.deltas import Delivery, Follower, Progress
from tvr.serve.job import Job
from tvr.serve.metrics import Metrics

_log = logging.getLogger("tvr.serve")

#: How often in a row a step may raise: the engine ends all requests and begins anew once.
_MOST_MISHAPS = 1


class EngineThread:
    """Steps an engine as long as it has requests.

    Args:
        llm: the engine; nobody else steps it.
        metrics: what steps are counted in.
        deliver: called from the thread after a step, with all that it brought.
        on_fatal: called from the thread once, as it ends by a fault it cannot recover from.

    Attributes:
        fatal: why the engine can serve no more; None: it can.
    """

    def __init__(
        self,
        llm: LLM,
        metrics: Metrics,
        deliver: Callable[[list[Delivery]], None],
        on_fatal: Callable[[], None],
    ) -> None:
        self.llm = llm
        self.fatal: str | None = None
        self._metrics = metrics
        self._deliver = deliver
        self._on_fatal = on_fatal
        self._followers: dict[str, Follower] = {}
        self._wake = threading.Event()
        self._stopping = False
        self._mishaps = 0
        self._seen_failure = llm.last_failure
        # A daemon: a device that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="tvr-engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and self.fatal is None and not self._stopping

    @property
    def num_followed(self) -> int:
        """Requests whose output has not all been handed over."""
        return len(self._followers)

    def submit(
        self,
        job: Job,
        prompt_index: int,
        prompt: Prompt,
        params: SamplingParams,
        cache_salt: str | None,
    ) -> None:
        """Queue a prompt; its output goes to `job`. May be called from any thread.

        Raises:
            RequestError: the engine refuses it.
        """
        request_id = f"{job.job_id}-{prompt_index}"
        answers = [Progress() for _ in range(params.n)]
        self._followers[request_id] = Follower(job, prompt_index, answers)
        try:
            self.llm.add_request(request_id, prompt, params, cache_salt=cache_salt)
        except BaseException:
            del self._followers[request_id]
            raise
        job.submitted(request_id)
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """End a request at the next step. May be called from any thread."""
        self.llm.abort(request_id)
        self._wake.set()

    def stop(self) -> None:
        """End the thread after its step, for which this does not wait."""
        self._stopping = True
        self._wake.set()

    @property
    def has_ended(self) -> bool:
        """Whether no step is under way, and none will be."""
        return self._stopping and not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping and self.fatal is None:
                self._wake.clear()
                if self.llm.has_unfinished_requests():
                    self._step()
                else:
                    self._wake.wait()
        except BaseException as error:
            _log.exception("the engine's thread has ended")
            self.fatal = _one_line(error)
        if self.fatal is not None:
            self._on_fatal()

    def _step(self) -> None:
        """Advance by a step and hand over what it brought."""
        try:
            outputs = self.llm.step()
        except Exception as error:
            # The engine ends every request with an error as the next step begins.
            _log.exception("a step has failed")
            self._mishaps += 1
            if self._mishaps > _MOST_MISHAPS:
                self.fatal = _one_line(error)
            return
        self._mishaps = 0
        now = time.monotonic()
        deliveries = []
        with self._metrics.of_a_step() as step:
            for output in outputs:
                follower = self._followers[output.request_id]
                step.grown(follower, output, now)
                delivery = follower.delivery(output)
                if delivery is not None:
                    deliveries.append(delivery)
                if output.finished:
                    del self._followers[output.request_id]
        if deliveries:
            self._deliver(deliveries)
        if self.llm.last_failure is not self._seen_failure:
            self._seen_failure = self.llm.last_failure
            _log.error("a step has failed:\n%s", self._seen_failure)
            if lost := self.llm.parts.runner.why_lost():
                self.fatal = f"the device is lost: {lost}"


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
