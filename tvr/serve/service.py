"""What a server does for each route; the room's parts put together."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tvr.core.llm import LLM
from tvr.core.sampling_params import SamplingParams
from tvr.serve.admission import Admission
from tvr.serve.answer import ClientLeft, EventStream, while_there, whole
from tvr.serve.body import BodyReader, parse
from tvr.serve.deltas import Delivery
from tvr.serve.engine_thread import EngineThread
from tvr.serve.errors import ApiError, long_json_response
from tvr.serve.job import Job
from tvr.serve.metrics import Metrics
from tvr.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Fields,
    GenerationFields,
    StreamOptions,
    TokenizeRequest,
)
from tvr.serve.settings import ServeSettings
from tvr.serve.shapes import ChatShape, CompletionShape, Shape
from tvr.serve.texts import Texts

_F = TypeVar("_F", bound=Fields)
_T = TypeVar("_T")

#: Threads for `/tokenize` and `/detokenize`.
_NUM_CONVERTERS = 2

#: What a request has become: what its answer looks like, and what streams have besides.
Prepared = tuple[Shape, StreamOptions]


class Service:
    """A model behind OpenAI's routes. Belongs to the event loop it is started in.

    Args:
        llm: the engine; from now on nobody else steps it.
        settings: of the server.

    Attributes:
        engine: the engine's thread.
        admission: counts unfinished sequences.
        jobs: the clients' requests that are being served.
        on_fatal: called in the event loop when the engine can serve no more.

    Raises:
        ConfigError: the model has no tokenizer.
    """

    def __init__(self, llm: LLM, settings: ServeSettings) -> None:
        self.settings = settings
        self.texts = Texts(llm)
        self.metrics = Metrics(llm, settings.model_names[0])
        self.admission = Admission(llm.limits.max_num_seqs + settings.max_waiting)
        self.jobs: set[Job] = set()
        self.on_fatal: Callable[[], None] = lambda: None
        self.engine = EngineThread(llm, self.metrics, self._deliver, self._engine_failed)
        self._bodies = BodyReader(settings.max_body_bytes)
        self._pool = ThreadPoolExecutor(settings.text_threads, thread_name_prefix="tvr-text")
        # Long texts take seconds, and those who want answers should not wait for them.
        self._converters = ThreadPoolExecutor(_NUM_CONVERTERS, thread_name_prefix="tvr-convert")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._created = int(time.time())

    def start(self) -> None:
        """Begin to serve, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.engine.start()

    def fail_all(self, error: ApiError) -> None:
        """End every client's request with `error`."""
        for job in self.jobs:
            job.fail(error)

    def stop(self, timeout_s: float) -> bool:
        """End all threads; return whether the engine's has ended in time."""
        for pool in (self._pool, self._converters):
            pool.shutdown(wait=False, cancel_futures=True)
        return self.engine.stop(timeout_s)

    async def completions(self, http: Request) -> Response:
        """Answer `POST /v1/completions`."""
        return await self._generate(http, self._prepare_completion)

    async def chat(self, http: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""
        return await self._generate(http, self._prepare_chat)

    async def tokenize(self, http: Request) -> Response:
        """Answer `POST /tokenize`."""
        return await self._convert(http, TokenizeRequest, self.texts.tokenize)

    async def detokenize(self, http: Request) -> Response:
        """Answer `POST /detokenize`."""
        return await self._convert(http, DetokenizeRequest, self.texts.detokenize)

    def models(self) -> list[dict[str, Any]]:
        """Return the names that requests may ask for, as `GET /v1/models` has them."""
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "tvr",
                "max_model_len": self.texts.max_model_len,
                "has_chat_template": self.texts.tokenizer.has_chat_template,
            }
            for name in self.settings.model_names
        ]

    def check_model(self, name: str | None) -> None:
        """Raise a 404 if a request asks for another model."""
        if name is not None and name not in self.settings.model_names:
            served = ", ".join(self.settings.model_names)
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"there is no model {name!r}; this server has {served}",
                param="model",
                code="model_not_found",
            )

    async def _generate(self, http: Request, prepare: Callable[[bytes, Job], Prepared]) -> Response:
        """Serve one of the two endpoints that generate."""
        self._check_alive()
        job = Job(
            uuid.uuid4().hex, time.monotonic(), self.admission, self.engine.abort, self.jobs.discard
        )
        self.jobs.add(job)
        streams = False
        try:
            async with self._bodies.body_of(http) as body:
                work = self._in_pool(partial(prepare, body, job))
                shape, options = await while_there(http.receive, work)
            if job.streams:
                streams = True  # the stream closes the job
                return EventStream(job, shape, options, self._in_pool)
            return await while_there(http.receive, whole(job, shape, self._in_pool))
        except (ClientLeft, ClientDisconnect):
            return Response(status_code=HTTPStatus.BAD_REQUEST)  # to nobody
        finally:
            if not streams:
                job.close()

    async def _convert(
        self, http: Request, kind: type[_F], convert: Callable[[_F], dict[str, Any]]
    ) -> Response:
        """Serve a route that needs no engine."""

        def converted(body: bytes) -> Response:
            request = kind.of(parse(body))
            self.check_model(getattr(request, "model", None))
            return long_json_response(convert(request))

        assert self._loop is not None, "started"
        try:
            async with self._bodies.body_of(http) as body:
                work = self._loop.run_in_executor(self._converters, converted, body)
                return await while_there(http.receive, work)
        except (ClientLeft, ClientDisconnect):
            return Response(status_code=HTTPStatus.BAD_REQUEST)  # to nobody

    def _in_pool(self, work: Callable[[], _T]) -> Awaitable[_T]:
        """Run what would keep the event loop from others."""
        assert self._loop is not None, "started"
        return self._loop.run_in_executor(self._pool, work)

    def _prepare_completion(self, body: bytes, job: Job) -> Prepared:
        request = CompletionRequest.of(parse(body))
        self.check_model(request.model)
        params = request.params()
        job.claim(len(request.prompt), params.n)
        prompts = self.texts.prompts_of(request)
        echoes = [self.texts.text_of(p) for p in request.prompt] if request.echo else None
        job_id = f"cmpl-{job.job_id}"
        shape = CompletionShape(
            job_id,
            request.model,
            self.texts.tokenizer,
            echoes=echoes,
            logprobs=request.logprobs is not None,
        )
        job.echoes = bool(request.echo)
        self._submit(job, request, prompts, params)
        return shape, request.usage

    def _prepare_chat(self, body: bytes, job: Job) -> Prepared:
        request = ChatRequest.of(parse(body))
        self.check_model(request.model)
        params = request.params()
        job.claim(1, params.n)
        token_ids = self.texts.conversation_of(request)
        num_top = (request.top_logprobs or 0) if request.logprobs else None
        job_id = f"chatcmpl-{job.job_id}"
        shape = ChatShape(job_id, request.model, self.texts.tokenizer, num_top)
        self._submit(job, request, [token_ids], params)
        return shape, request.usage

    def _submit(
        self,
        job: Job,
        request: GenerationFields,
        prompts: list[list[int]],
        params: SamplingParams,
    ) -> None:
        job.streams = bool(request.stream)
        job.has_logprobs = params.logprobs is not None
        job.may_forbid = bool(params.allowed_token_ids or params.bad_words or params.min_tokens)
        for index, token_ids in enumerate(prompts):
            if job.closed:
                return
            self.engine.submit(job, index, token_ids, params, request.cache_salt)

    def _check_alive(self) -> None:
        if not self.engine.is_alive:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the engine has ended: {self.engine.fatal or 'the server is shutting down'}",
                code="engine_dead",
            )

    def _deliver(self, deliveries: list[Delivery]) -> None:
        """Bring what a step gave to the event loop: one call, whatever the number of clients."""
        assert self._loop is not None, "started"
        self._loop.call_soon_threadsafe(_put_all, deliveries)

    def _engine_failed(self) -> None:
        assert self._loop is not None, "started"
        self._loop.call_soon_threadsafe(self._end_by_fault)

    def _end_by_fault(self) -> None:
        self.fail_all(
            ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the engine has ended: {self.engine.fatal}",
                code="engine_dead",
            )
        )
        self.on_fatal()


def _put_all(deliveries: list[Delivery]) -> None:
    for delivery in deliveries:
        delivery.job.put(delivery)
