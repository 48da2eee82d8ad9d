"""What a server does for each route; the room's parts put together."""

from __future__ import annotations

import asyncio
import pickle
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tvr.core.llm import LLM
from tvr.core.tokenizer import Tokenizer
from tvr.errors import ConfigError
from tvr.serve.admission import Admission
from tvr.serve.answer import ClientLeft, EventStream, while_there, whole
from tvr.serve.apart import Apart
from tvr.serve.body import BodyReader
from tvr.serve.deltas import Delivery
from tvr.serve.engine_thread import EngineThread
from tvr.serve.errors import ApiError
from tvr.serve.job import Job
from tvr.serve.json_answer import JsonAnswer
from tvr.serve.metrics import Metrics
from tvr.serve.reading import Asked, Reader
from tvr.serve.requests import StreamOptions
from tvr.serve.settings import ServeSettings
from tvr.serve.shapes import ChatShape, CompletionShape, Shape
from tvr.serve.texts import Texts

_T = TypeVar("_T")

#: Threads for `/tokenize` and `/detokenize`.
_NUM_CONVERTERS = 2

#: Bytes of a body that is read in this process: none of that takes over some milliseconds.
_MOST_HERE = 1 << 14

#: What a request has become: what its answer looks like, and what streams have besides.
Prepared = tuple[Shape, StreamOptions]


class Service:
    """A model behind OpenAI's routes. Belongs to the event loop it is started in.

    Args:
        llm: the engine; from now on nobody else steps it.
        settings: of the server.

    Attributes:
        tokenizer, max_model_len: of the model.
        reader: reads clients' bodies.
        engine: the engine's thread.
        admission: counts unfinished sequences.
        jobs: the clients' requests that are being served.
        on_fatal: called in the event loop when the engine can serve no more.

    Raises:
        ConfigError: the model has no tokenizer.
    """

    def __init__(self, llm: LLM, settings: ServeSettings) -> None:
        self.settings = settings
        if llm.tokenizer is None:
            raise ConfigError("tvr serve needs a tokenizer, and the checkpoint has none")
        self.tokenizer: Tokenizer = llm.tokenizer
        self.max_model_len = llm.limits.max_model_len
        vocab_size = llm.parts.model_config.vocab_size
        texts = Texts(self.tokenizer, self.max_model_len, vocab_size)
        self.reader = Reader(texts, settings.model_names)
        self.metrics = Metrics(llm, settings.model_names[0])
        self.admission = Admission(llm.limits.max_num_seqs + settings.max_waiting)
        self.jobs: set[Job] = set()
        self.on_fatal: Callable[[], None] = lambda: None
        self.engine = EngineThread(llm, self.metrics, self._deliver, self._engine_failed)
        self._bodies = BodyReader(settings.max_body_bytes)
        self._pool = ThreadPoolExecutor(settings.text_threads, thread_name_prefix="tvr-text")
        # Texts may take seconds, and those who want answers should not wait for them.
        self._converters = ThreadPoolExecutor(_NUM_CONVERTERS, thread_name_prefix="tvr-convert")
        reader = pickle.dumps(self.reader)
        self._apart = Apart(reader, "tvr-long-text")
        self._converter_apart = Apart(reader, "tvr-long-convert")
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

    def stop(self) -> None:
        """End all threads; the engine's, and those with short texts, end after what they do."""
        self.engine.stop()
        for pool in (self._pool, self._converters):
            pool.shutdown(wait=False, cancel_futures=True)
        for apart in (self._apart, self._converter_apart):
            apart.close()

    async def completions(self, http: Request) -> Response:
        """Answer `POST /v1/completions`."""
        return await self._generate(http, "completions", self._completion_shape)

    async def chat(self, http: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""
        return await self._generate(http, "chat", self._chat_shape)

    async def tokenize(self, http: Request) -> Response:
        """Answer `POST /tokenize`."""
        return await self._convert(http, "tokenize")

    async def detokenize(self, http: Request) -> Response:
        """Answer `POST /detokenize`."""
        return await self._convert(http, "detokenize")

    def models(self) -> list[dict[str, Any]]:
        """Return the names that requests may ask for, as `GET /v1/models` has them."""
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "tvr",
                "max_model_len": self.max_model_len,
                "has_chat_template": self.tokenizer.has_chat_template,
            }
            for name in self.settings.model_names
        ]

    async def _generate(
        self, http: Request, kind: str, shape_of: Callable[[Asked, Job], Shape]
    ) -> Response:
        """Serve one of the two endpoints that generate; `kind` is its method of the reader."""
        self._check_alive()
        job = Job(
            uuid.uuid4().hex, time.monotonic(), self.admission, self.engine.abort, self.jobs.discard
        )
        self.jobs.add(job)
        streams = False
        try:
            shape, options = await self._prepare(http, kind, job, shape_of)
            if job.streams:
                streams = True  # the stream closes the job
                return EventStream(job, shape, options, self._in_pool)
            return await while_there(http.receive, whole(job, shape, self._in_pool))
        except (ClientLeft, ClientDisconnect):
            return Response(status_code=HTTPStatus.BAD_REQUEST)  # to nobody
        finally:
            if not streams:
                job.close()

    async def _prepare(
        self, http: Request, kind: str, job: Job, shape_of: Callable[[Asked, Job], Shape]
    ) -> Prepared:
        """Read a request and hand it to the engine; its body is not kept beyond that."""
        async with self._bodies.body_of(http) as body:
            self._check_alive()
            asked: Asked | None = None
            if len(body) > _MOST_HERE:
                there = asyncio.wrap_future(self._apart.submit(kind, body))
                asked = await while_there(http.receive, there)
            work = self._in_pool(
                lambda: self._submit(asked or getattr(self.reader, kind)(body), job, shape_of)
            )
            return await while_there(http.receive, work)

    async def _convert(self, http: Request, kind: str) -> Response:
        """Serve a route that needs no engine; `kind` is its method of the reader."""
        assert self._loop is not None, "started"
        work: asyncio.Future[bytes]
        try:
            async with self._bodies.body_of(http) as body:
                self._check_alive()
                if len(body) > _MOST_HERE:
                    work = asyncio.wrap_future(self._converter_apart.submit(kind, body))
                else:
                    convert = getattr(self.reader, kind)
                    work = self._loop.run_in_executor(self._converters, convert, body)
                answer = await while_there(http.receive, work)
                return JsonAnswer(answer)
        except (ClientLeft, ClientDisconnect):
            return Response(status_code=HTTPStatus.BAD_REQUEST)  # to nobody

    def _in_pool(self, work: Callable[[], _T]) -> Awaitable[_T]:
        """Run what would keep the event loop from others."""
        assert self._loop is not None, "started"
        return self._loop.run_in_executor(self._pool, work)

    def _completion_shape(self, asked: Asked, job: Job) -> Shape:
        return CompletionShape(
            f"cmpl-{job.job_id}",
            asked.model,
            self.tokenizer,
            echoes=asked.echoes,
            logprobs=asked.params.logprobs is not None,
        )

    def _chat_shape(self, asked: Asked, job: Job) -> Shape:
        job_id = f"chatcmpl-{job.job_id}"
        return ChatShape(job_id, asked.model, self.tokenizer, asked.params.logprobs)

    def _submit(self, asked: Asked, job: Job, shape_of: Callable[[Asked, Job], Shape]) -> Prepared:
        params = asked.params
        job.claim(len(asked.prompts), params.n)
        shape = shape_of(asked, job)
        job.streams = asked.streams
        job.echoes = asked.echoes is not None
        job.has_logprobs = params.logprobs is not None
        job.may_forbid = bool(params.allowed_token_ids or params.bad_words or params.min_tokens)
        for index, prompt in enumerate(asked.prompts):
            if job.closed:
                break
            self.engine.submit(job, index, prompt.tolist(), params, asked.cache_salt)
        return shape, asked.options

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
