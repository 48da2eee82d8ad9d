"""Sending answers, whole or as server-sent events, for as long as a client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tvr.core.outputs import CompletionOutput
from tvr.core.step_result import NO_TOKEN
from tvr.serve.deltas import Delivery, Delta, complete
from tvr.serve.errors import ApiError, bad_request
from tvr.serve.job import Job
from tvr.serve.json_answer import JsonAnswer, encode_long, json_text
from tvr.serve.requests import StreamOptions
from tvr.serve.shapes import Shape
from tvr.serve.usage import Usage

_T = TypeVar("_T")

#: Runs a function in another thread.
InPool = Callable[[Callable[[], Any]], Awaitable[Any]]

#: Tokens with log-probabilities whose events take about a millisecond to make.
_MANY = 32

#: Characters of answers that take about a millisecond to encode.
_MOST_CHARS = 100_000

_FAILED = ("error", "abort")
_DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the events
]


class ClientLeft(Exception):
    """Nobody is there to be answered any more."""


async def while_there(receive: Receive, work: Awaitable[_T]) -> _T:
    """Return what `work` returns, unless the client leaves first, which cancels it.

    Args:
        receive: of a request whose body has been read.

    Raises:
        ClientLeft: it has left.
    """
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_leave(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _leave(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole(job: Job, shape: Shape, in_pool: InPool) -> Response:
    """Return the complete answers.

    Args:
        job, shape: of the request.
        in_pool: runs what would keep the event loop from others.

    Raises:
        ApiError: one of them failed.
    """
    deliveries: list[Delivery] = []
    while not job.is_over:
        taken = await job.take()
        for delivery in taken:
            _check(delivery.output.outputs, job)
        deliveries += taken
    made: Response
    if job.has_logprobs or job.echoes or _num_chars(deliveries) > _MOST_CHARS:
        made = await in_pool(partial(_assembled, shape, deliveries))
    else:
        made = _assembled(shape, deliveries)
    return made


def _num_chars(deliveries: list[Delivery]) -> int:
    return sum(len(out.text) for delivery in deliveries for out in delivery.output.outputs)


def _assembled(shape: Shape, deliveries: list[Delivery]) -> Response:
    usage = Usage()
    choices: list[dict[str, Any]] = []
    for delivery in map(complete, sorted(deliveries, key=lambda d: d.prompt)):
        usage.add(delivery)
        choices += shape.whole(delivery)
    head = json_text({**shape.whole_head, "usage": usage.counts}).removesuffix("}")
    body = f'{head},"choices":[{",".join(map(encode_long, choices))}]}}'
    return JsonAnswer(body.encode())


class EventStream(Response):
    """The answers as they come, an event for each step of each of them.

    An error becomes an event with an error object, and ends the stream without `[DONE]`.

    Args:
        job: its client's request, which is with the engine already; closed at the end.
        shape: what events look like.
        options: what there is besides answers.
        in_pool: see `whole`.
    """

    def __init__(self, job: Job, shape: Shape, options: StreamOptions, in_pool: InPool) -> None:
        super().__init__()
        self._in_pool = in_pool
        self._job = job
        self._shape = shape
        self._options = options
        self._usage = Usage()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, and close the job whatever happens."""
        try:
            await send(
                {"type": "http.response.start", "status": HTTPStatus.OK, "headers": _HEADERS}
            )
            await while_there(receive, self._send_all(send))
        except ClientLeft:
            pass  # the job ends with its client
        finally:
            self._job.close()

    async def _send_all(self, send: Send) -> None:
        last = _DONE
        events = b""
        try:
            while not self._job.is_over:
                for delivery in await self._job.take():
                    if self._job.echoes or _is_large(delivery):
                        work = partial(self._events, delivery, encode_long)
                        events += await self._in_pool(work)
                    else:
                        events += self._events(delivery, json_text)
                    _check(delivery.deltas, self._job)
                await send({"type": "http.response.body", "body": events, "more_body": True})
                events = b""
            if self._options.include_usage:
                usage = {"choices": [], "usage": self._usage.counts}
                last = _event({**self._shape.piece_head, **usage}) + _DONE
        except ApiError as error:
            last = events + _event(error.body)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _events(self, delivery: Delivery, encode: Callable[[object], str]) -> bytes:
        self._usage.add(delivery)
        head = self._shape.piece_head
        if self._options.include_usage:
            each = self._options.continuous_usage_stats
            head = {**head, "usage": self._usage.counts if each else None}
        # Of an answer that failed, what came before; the error is an event of its own.
        deltas = [
            delta._replace(finish_reason=None) if delta.finish_reason in _FAILED else delta
            for delta in delivery.deltas
            if delta.finish_reason not in _FAILED or delta.token_ids
        ]
        choices = self._shape.pieces(delivery._replace(deltas=deltas))
        return b"".join(_event({**head, "choices": [choice]}, encode) for choice in choices)


def _event(content: dict[str, Any], encode: Callable[[object], str] = json_text) -> bytes:
    return b"data: %b\n\n" % encode(content).encode()


def _is_large(delivery: Delivery) -> bool:
    """Whether events take long to make: log-probabilities of a prompt, or of many tokens."""
    num_logprobs = sum(len(delta.logprobs or ()) for delta in delivery.deltas)
    return delivery.output.prompt_logprobs is not None or num_logprobs > _MANY


def _check(outs: Sequence[Delta | CompletionOutput], job: Job) -> None:
    """Raise what ended an answer before its time."""
    for out in outs:
        if out.finish_reason == "abort":
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE, "the answer was cut off: the engine was closed"
            )
        if out.finish_reason == "error":
            if out.error == NO_TOKEN and job.may_forbid:
                raise bad_request(
                    "no token is left to choose: all are forbidden by allowed_token_ids, bad_words "
                    "or min_tokens together; allow some",
                    code="no_token",
                )
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, out.error or "", code="engine_error")
