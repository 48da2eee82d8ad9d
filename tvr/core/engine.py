"""The engine: requests in, outputs that grow from step to step out."""

from __future__ import annotations

import random
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Mapping

from tvr.core.bad_words import bad_word_ids
from tvr.core.batch import pack_step
from tvr.core.decode_inputs import pack_decodes
from tvr.core.engine_config import EngineConfig
from tvr.core.garbage import frozen_objects
from tvr.core.loader import EngineParts
from tvr.core.outputs import RequestOutput
from tvr.core.prompt import Prompt, prompt_token_ids
from tvr.core.request import Completion, Request
from tvr.core.runner import Pending
from tvr.core.sampler import child_seed
from tvr.core.sampler_state import RowState
from tvr.core.sampling_params import SamplingParams
from tvr.core.schedule_output import ScheduleOutput, SequenceUpdate
from tvr.core.scheduler import Scheduler
from tvr.core.step_extras import NO_EXTRAS, extras_of
from tvr.core.step_result import StepResult
from tvr.errors import ConfigError, OpFault, PolicyError, RequestError


class Engine:
    """Steps one model for any number of requests.

    The scheduler runs up to `max_lag` steps ahead of the device, so text is made while the next
    step computes. Every method may be called from any thread. Whoever calls `step` steps for all,
    one thread at a time; `add_request` and `abort` never wait for a step.

    Args:
        config: how the engine was asked to be.
        parts: what was loaded for it.

    Attributes:
        last_failure: the traceback of the newest step that failed; None: no step has.
    """

    def __init__(self, config: EngineConfig, parts: EngineParts) -> None:
        self.config = config
        self.parts = parts
        self.tokenizer = parts.tokenizer
        self.limits = parts.limits
        self.last_failure: str | None = None
        self._runner = parts.runner
        self._random = random.Random(config.seed)
        self._closed = False
        self._stepping = threading.Lock()  # held by the thread that steps
        # Guards what add_request shares with step. Reentrant: the garbage collector may close an
        # abandoned stream, which aborts its request, at any moment of any thread.
        self._lock = threading.RLock()
        self._inbox: deque[tuple[str, Request]] = deque()  # what to "add" and to "abort"
        self._requests: dict[str, Request] = {}
        self._completions: dict[str, tuple[Request, Completion]] = {}
        self._special: set[str] = set()  # requests that want more of a step than tokens
        self._undelivered: dict[str, RequestOutput] = {}
        self._counts: Counter[str] = Counter()  # the scheduler's, kept over a new beginning
        self._start()

    def _start(self) -> None:
        """Begin with nothing scheduled. Steps still on the device come before all later ones."""
        self._scheduler = Scheduler(
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_model_len=self.limits.max_model_len,
            enable_prefix_caching=self.config.enable_prefix_caching,
            max_lag=self.config.max_lag,
            policy=self.config.scheduling_policy,
            counts=self._counts,
        )
        self._next_index = [0] * self.limits.max_num_seqs
        self._in_flight: deque[tuple[ScheduleOutput, Pending | Exception]] = deque()
        self._torn = False  # whether scheduler and requests may be between two consistent states

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request; `step` will return its outputs.

        Args:
            request_id: unique among the unfinished requests.
            prompt: text, token ids, or a dict with "prompt" or "prompt_token_ids".
            sampling_params: None: the defaults.
            priority: smaller is more urgent, for scheduling policies that look at it.
            cache_salt: only requests of the same salt share cached prefixes.

        Raises:
            RequestError: the request can never be served as asked; the engine is untouched.
            ConfigError: the engine is closed.
        """
        self._enqueue(request_id, prompt, sampling_params, priority=priority, cache_salt=cache_salt)

    def _enqueue(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        *,
        followed: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
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
        if self.tokenizer is None and (params.stop_strings or params.bad_words):
            what = "stop strings" if params.stop_strings else "bad_words"
            raise RequestError(f"{what} need a tokenizer, and the checkpoint has none")
        bad_words: tuple[tuple[int, ...], ...] = ()
        if self.tokenizer is not None and params.bad_words:
            bad_words = bad_word_ids(self.tokenizer, params.bad_words, vocab_size)
        max_new = self.limits.max_model_len - len(token_ids)
        max_tokens = max_new if params.max_tokens is None else min(params.max_tokens, max_new)
        if max_tokens < 1:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len is "
                f"{self.limits.max_model_len} and must leave room for one new token"
            )
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
            bad_words=bad_words,
            followed=followed,
            priority=priority,
            cache_salt=cache_salt,
        )
        request.completions[0].sequence.set_limits(
            max_model_len=self.limits.max_model_len,
            num_blocks=self.limits.num_blocks,
            block_size=self.limits.block_size,
        )
        sequence_ids = [c.sequence.request_id for c in request.completions]
        with self._lock:
            if self._closed:
                raise ConfigError("the engine is closed; make a new one")
            for taken in (request_id, *sequence_ids):
                if self._is_live(taken):
                    raise RequestError(
                        f"request id {taken!r} is in use by an unfinished request; "
                        "wait for it to finish or choose another id"
                    )
            self._requests[request_id] = request
            if request.is_special:
                self._special.add(request_id)
            for completion in request.completions:
                self._completions[completion.sequence.request_id] = (request, completion)
            self._inbox.append(("add", request))
        return request

    def _is_live(self, request_id: str) -> bool:
        return request_id in self._requests or request_id in self._completions

    def abort(self, request_id: str) -> None:
        """End a request at the next step; unknown and finished ids are ignored."""
        # The request, not its id: by the next step another one may go by that id.
        if (request := self._requests.get(request_id)) is not None:
            self._inbox.append(("abort", request))

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` still has something to do or to deliver."""
        return bool(self._requests or self._undelivered or self._in_flight)

    def step(self) -> list[RequestOutput]:
        """Advance by one device step and return the outputs that grew or ended.

        An output is one object for the life of its request; copy what you want to keep of its
        present state. May return nothing while a long prompt is read.

        Raises:
            PolicyError: the scheduling policy failed. No request is lost; call `step` again.
            OpFault: `shadow` found an op at fault. Every request has ended with it as error.
        """
        with self._stepping:
            self._advance()
            grown = list(self._undelivered.values())
            self._undelivered.clear()
        return grown

    def _drive(self) -> None:
        """Advance by one device step; outputs of `add_request`'s requests wait for `step`."""
        with self._stepping:
            self._advance()

    def _advance(self) -> None:
        """Fill the pipeline, wait for its oldest step and apply the results.

        An exception where `_torn` is set, an interrupt above all, leaves the books undone; the
        next call then begins anew. One that comes while waiting for the device does no harm.
        """
        self._drain_inbox()
        self._torn = True
        while len(self._in_flight) <= self.config.max_lag:
            try:
                output = self._scheduler.schedule()
            except PolicyError:
                self._torn = False  # nothing has changed
                raise
            if output is None:
                break
            launched = self._launch(output)
            self._in_flight.append((output, launched))
            if isinstance(launched, Exception):
                break  # a step ahead of it would build on what it should have written
        self._torn = False
        if self._in_flight:
            self._collect()

    def _drain_inbox(self) -> None:
        """Bring new requests and aborts to the scheduler."""
        if self._torn:
            self._end_all("error", "the engine was interrupted in the middle of a step")
        self._torn = True
        with self._lock:
            while self._inbox:
                what, request = self._inbox.popleft()
                if request.output.finished:
                    continue
                for completion in request.completions:
                    if what == "add":
                        self._scheduler.add(completion.sequence)
                    else:
                        self._scheduler.abort(completion.sequence.request_id)
                if what == "abort":
                    self._end(request, "abort")
        self._torn = False

    def _launch(self, output: ScheduleOutput) -> Pending | Exception:
        """Send a scheduled step to the device; an exception is the step's result, not ours."""
        try:
            resets = [self._row_state(*reset) for reset in output.row_resets]
            token_ids = [
                self._completions[e.request_id][1].sequence.token_ids[
                    e.start : e.start + e.num_tokens
                ]
                for e in output.chunks
            ]
            extras = extras_of(output, self._completions) if self._special else NO_EXTRAS
            next_index = self._next_index
            if not output.chunks and self._runner.holds(output.num_decodes):
                return self._runner.submit_decodes(pack_decodes(output.decodes, next_index), extras)
            return self._runner.submit(pack_step(output, token_ids, next_index), resets, extras)
        except Exception as error:
            return error

    def _row_state(self, row: int, sequence_id: str) -> RowState:
        request, completion = self._completions[sequence_id]
        metrics = request.output.metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = time.monotonic()
        tokens, num_prompt = completion.sequence.token_ids, completion.sequence.num_prompt_tokens
        return RowState(
            row=row,
            params=request.params,
            seed=completion.seed,
            prompt_token_ids=tokens[:num_prompt],
            output_token_ids=tokens[num_prompt:],
            bad_words=request.bad_words,
        )

    def _collect(self) -> None:
        """Wait for the oldest step in flight and apply its results."""
        output, pending = self._in_flight[0]
        result = StepResult(tokens=[])
        failure = None
        try:
            if isinstance(pending, Exception):
                raise pending
            result = pending()
        except OpFault as fault:
            self._end_all("error", str(fault))
            raise
        except Exception as error:
            # Its text is enough: through its frames the traceback refers to the step's tensors,
            # and to the error itself, so that they would stay until the garbage collector runs.
            self.last_failure = "".join(traceback.format_exception(error))
            culprit, reason = self.parts.ops.culprit(error), " ".join(str(error).split())
            where = f" in {culprit}" if culprit else ""
            error.__traceback__ = None
            failure = f"step {output.step_id} failed{where}: {type(error).__name__}: {reason}"
        self._torn = True
        self._in_flight.popleft()
        if failure is not None:
            updates = self._scheduler.fail_step(output.step_id, failure)
        else:
            for prompt, rows in result.prompts:
                if not prompt.request.output.finished:
                    prompt.request.add_prompt_logprobs(prompt.start, rows)
            columns = result.tokens, result.token_errors(output), result.logprobs
            updates = self._scheduler.update_columns(output.step_id, *columns)
        self._apply(updates)
        self._torn = False

    def _apply(self, updates: list[SequenceUpdate]) -> None:
        """Let requests grow; keep their outputs for the next `step`, and forget those over."""
        completions, undelivered = self._completions, self._undelivered
        for update in updates:
            request, completion = completions[update[0].request_id]
            if request.apply(completion, update):
                self._scheduler.finish(completion.sequence.request_id, "stop")
            if not request.followed:
                undelivered[request.request_id] = request.output
            if completion.output.finish_reason is not None and request.output.finished:
                self._forget(request)

    def _forget(self, request: Request) -> None:
        with self._lock:
            del self._requests[request.request_id]
            self._special.discard(request.request_id)
            for completion in request.completions:
                del self._completions[completion.sequence.request_id]

    def _end(self, request: Request, reason: str, error: str | None = None) -> None:
        request.end(reason, error)
        if not request.followed:
            self._undelivered[request.request_id] = request.output
        self._forget(request)

    def _end_all(self, reason: str, error: str | None = None) -> None:
        """End every request there is and begin with nothing scheduled."""
        self._torn = True
        with self._lock:
            self._inbox.clear()
            for request in list(self._requests.values()):
                self._end(request, reason, error)
            self._completions.clear()
            self._start()

    def _conclude(self, requests: list[Request]) -> None:
        """Abort what is unfinished and, if nobody else is served, wait for discarded steps."""
        for request in requests:
            if not request.output.finished:
                self._inbox.append(("abort", request))
        # If a step is going on, in another thread or (when the garbage collector closes a
        # stream) further up in this one, the aborts are for the next.
        if self._stepping.acquire(blocking=False):
            try:
                self._drain_inbox()
                while self._in_flight and not self._requests:
                    self._collect()
            finally:
                self._stepping.release()

    def stats(self) -> Mapping[str, int]:
        """Return counts of the moment: running, waiting, KV blocks in use and in all; and so far:
        steps, by whether they were launched as a CUDA graph or op by op, preemptions, prompt
        tokens looked up in the prefix cache and those found there."""
        blocks = self._scheduler.block_manager
        return {
            "num_running": self._scheduler.num_running,
            "num_waiting": self._scheduler.num_waiting,
            "num_blocks": self.limits.num_blocks,
            "num_used_blocks": self.limits.num_blocks - blocks.num_free,
            "num_graph_steps": self._runner.counts["graph"],
            "num_eager_steps": self._runner.counts["eager"],
            "num_preemptions": self._counts["preemptions"],
            "num_queried_tokens": self._counts["queried_tokens"],
            "num_cached_tokens": self._counts["cached_tokens"],
        }

    def close(self) -> None:
        """End every request and the device worker, and let go of the model and the KV pool."""
        with self._stepping:
            if self._closed:
                return
            with self._lock:
                self._closed = True
            self._end_all("abort")
            self._runner.close()
            if self.parts.left_out:
                frozen_objects().unfreeze()
