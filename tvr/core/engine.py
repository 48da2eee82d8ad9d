"""The engine: requests in, outputs that grow from step to step out."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Mapping

from tvr.core.batch import pack_step
from tvr.core.engine_config import EngineConfig
from tvr.core.loader import EngineParts
from tvr.core.outputs import RequestOutput
from tvr.core.prompt import Prompt, prompt_token_ids
from tvr.core.request import Completion, Request
from tvr.core.runner import Pending, RowState
from tvr.core.sampler import child_seed
from tvr.core.sampling_params import SamplingParams
from tvr.core.schedule_output import Result, ScheduleOutput, SequenceUpdate
from tvr.core.scheduler import Scheduler
from tvr.errors import RequestError


class Engine:
    """Steps one model for any number of requests.

    The scheduler runs up to `max_lag` steps ahead of the device, so text is made while the next
    step computes. Only the thread that calls `step` touches the device; `add_request` and `abort`
    may be called from any thread.

    Args:
        config: how the engine was asked to be.
        parts: what was loaded for it.
    """

    def __init__(self, config: EngineConfig, parts: EngineParts) -> None:
        self.config = config
        self.parts = parts
        self.tokenizer = parts.tokenizer
        self.limits = parts.limits
        self._scheduler = Scheduler(
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_model_len=self.limits.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            max_lag=config.max_lag,
        )
        self._runner = parts.runner
        self._next_index = [0] * self.limits.max_num_seqs
        self._in_flight: deque[tuple[ScheduleOutput, Pending | Exception]] = deque()
        self._random = random.Random(config.seed)
        self._lock = threading.Lock()  # guards what add_request and abort share with step
        self._inbox: deque[Request | str] = deque()  # new requests, and ids to abort
        self._requests: dict[str, Request] = {}
        self._completions: dict[str, tuple[Request, Completion]] = {}
        self._undelivered: dict[str, RequestOutput] = {}
        self._followed: set[str] = set()  # requests whose outputs somebody else hands out

    def add_request(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> None:
        """Queue a request; `step` will return its outputs.

        Args:
            request_id: unique among the unfinished requests.
            prompt: text, token ids, or a dict with "prompt" or "prompt_token_ids".
            sampling_params: None: the defaults.

        Raises:
            RequestError: the request can never be served as asked; the engine is untouched.
        """
        self._enqueue(request_id, prompt, sampling_params)

    def _enqueue(
        self, request_id: str, prompt: Prompt, sampling_params: SamplingParams | None
    ) -> Request:
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(request_id, str) or not isinstance(params, SamplingParams):
            raise RequestError(
                f"add_request takes a string id and SamplingParams, got "
                f"{type(request_id).__name__} and {type(params).__name__}"
            )
        vocab_size = self.parts.model_config.vocab_size
        text, token_ids = prompt_token_ids(prompt, self.tokenizer, vocab_size)
        params.check_vocab(vocab_size)
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the checkpoint has none")
        max_new = self.limits.max_model_len - len(token_ids)
        max_tokens = max_new if params.max_tokens is None else min(params.max_tokens, max_new)
        if max_tokens < 1:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len is "
                f"{self.limits.max_model_len} and must leave room for one new token"
            )
        with self._lock:
            seed = self._random.getrandbits(63) if params.seed is None else params.seed
            request = Request(
                request_id,
                text,
                token_ids,
                params,
                seeds=[child_seed(seed, i) for i in range(params.n)],
                max_tokens=max_tokens,
                tokenizer=self.tokenizer,
                eos_token_ids=self.parts.eos_token_ids,
            )
            sequence_ids = [c.sequence.request_id for c in request.completions]
            taken = [i for i in (request_id, *sequence_ids) if self._is_live(i)]
            if taken:
                raise RequestError(
                    f"request id {taken[0]!r} is in use by an unfinished request; "
                    "wait for it to finish or choose another id"
                )
            request.completions[0].sequence.set_limits(
                max_model_len=self.limits.max_model_len,
                num_blocks=self.limits.num_blocks,
                block_size=self.limits.block_size,
            )
            self._requests[request_id] = request
            for completion in request.completions:
                self._completions[completion.sequence.request_id] = (request, completion)
            self._inbox.append(request)
        return request

    def _is_live(self, request_id: str) -> bool:
        return request_id in self._requests or request_id in self._completions

    def abort(self, request_id: str) -> None:
        """End a request at the next step; unknown and finished ids are ignored."""
        with self._lock:
            self._inbox.append(request_id)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` still has something to do or to deliver."""
        return bool(self._requests or self._undelivered or self._in_flight)

    def step(self) -> list[RequestOutput]:
        """Advance by one device step and return the outputs that grew or ended.

        An output is one object for the life of its request; copy what you want to keep of its
        present state. May return nothing while a long prompt is read.
        """
        self._deliver_later(self._advance())
        grown = list(self._undelivered.values())
        self._undelivered.clear()
        return grown

    def _advance(self) -> dict[str, RequestOutput]:
        """Fill the pipeline, wait for its oldest step, and return the outputs it changed."""
        grown = self._drain_inbox()
        while len(self._in_flight) <= self.config.max_lag:
            output = self._scheduler.schedule()
            if output is None:
                break
            self._in_flight.append((output, self._launch(output)))
        if self._in_flight:
            grown.update(self._collect())
        return grown

    def _drain_inbox(self) -> dict[str, RequestOutput]:
        """Bring new requests and aborts to the scheduler; return outputs that ended."""
        ended: dict[str, RequestOutput] = {}
        with self._lock:
            while self._inbox:
                item = self._inbox.popleft()
                if isinstance(item, Request):
                    for completion in item.completions:
                        self._scheduler.add(completion.sequence)
                elif (request := self._requests.get(item)) is not None:
                    for completion in request.completions:
                        self._scheduler.abort(completion.sequence.request_id)
                    request.abort()
                    self._forget(request)
                    ended[request.request_id] = request.output
        return ended

    def _launch(self, output: ScheduleOutput) -> Pending | Exception:
        """Send a scheduled step to the device; an exception is the step's result, not ours."""
        resets = []
        for row, sequence_id in output.row_resets:
            request, completion = self._completions[sequence_id]
            sequence = completion.sequence
            resets.append(
                RowState(
                    row=row,
                    params=request.params,
                    seed=completion.seed,
                    prompt_token_ids=sequence.token_ids[: sequence.num_prompt_tokens],
                    output_token_ids=sequence.token_ids[sequence.num_prompt_tokens :],
                )
            )
        prefills = output.entries[output.num_decodes :]
        token_ids = [
            self._completions[e.request_id][1].sequence.token_ids[e.start : e.start + e.num_tokens]
            for e in prefills
        ]
        packed = pack_step(output, token_ids, self._next_index)
        try:
            return self._runner.submit(packed, resets)
        except Exception as error:
            return error

    def _collect(self) -> dict[str, RequestOutput]:
        """Wait for the oldest step in flight and apply its results."""
        output, pending = self._in_flight[0]
        try:
            if isinstance(pending, Exception):
                raise pending
            tokens = pending()  # an interrupt in here leaves the step in flight, to wait for again
        except Exception as error:
            self._in_flight.popleft()
            message = f"step {output.step_id} failed: {type(error).__name__}: {error}"
            updates = self._scheduler.fail_step(output.step_id, message)
        else:
            self._in_flight.popleft()
            sampling = (e for e in output.entries if e.samples)
            results = [
                Result(e.request_id, e.epoch, token)
                if token >= 0
                else Result(e.request_id, e.epoch, None, "the logits hold NaN or allow no token")
                for e, token in zip(sampling, tokens, strict=True)
            ]
            updates = self._scheduler.update(output.step_id, results)
        return self._apply(updates)

    def _apply(self, updates: list[SequenceUpdate]) -> dict[str, RequestOutput]:
        grown: dict[str, RequestOutput] = {}
        for update in updates:
            found = self._completions.get(update.sequence.request_id)
            if found is None:
                continue  # its request was aborted while the step was in flight
            request, completion = found
            if request.apply(completion, update):
                self._scheduler.finish(update.sequence.request_id, "stop")
            grown[request.request_id] = request.output
            if request.output.finished:
                with self._lock:
                    self._forget(request)
        return grown

    def _forget(self, request: Request) -> None:
        del self._requests[request.request_id]
        for completion in request.completions:
            del self._completions[completion.sequence.request_id]

    def _deliver_later(self, outputs: dict[str, RequestOutput]) -> None:
        """Keep for the next `step` what requests of `add_request` got meanwhile."""
        self._undelivered.update(
            (i, output) for i, output in outputs.items() if i not in self._followed
        )

    def _conclude(self, requests: list[Request]) -> None:
        """Abort what is unfinished and, if nobody else is served, wait for discarded steps."""
        for request in requests:
            if not request.output.finished:
                self.abort(request.request_id)
        self._deliver_later(self._drain_inbox())
        self._followed.difference_update(r.request_id for r in requests)
        while self._in_flight and not self._requests:
            self._collect()

    def stats(self) -> Mapping[str, int]:
        """Return counts of the moment: running, waiting, KV blocks in use and in all."""
        blocks = self._scheduler.block_manager
        return {
            "num_running": self._scheduler.num_running,
            "num_waiting": self._scheduler.num_waiting,
            "num_blocks": self.limits.num_blocks,
            "num_used_blocks": blocks.counts().used,
        }

    def close(self) -> None:
        """End the device worker; unfinished requests are dropped."""
        self._runner.close()
