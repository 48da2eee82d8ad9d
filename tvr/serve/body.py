"""Bodies of requests: read within limits, then parsed as strict JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, NoReturn

from starlette.requests import Request

from tvr.serve.errors import ApiError, bad_request

#: Seconds that a body may take to come.
_PATIENCE_S = 60.0

#: A body over the limit is read on this far and dropped, so that its sender, who may not listen
#: before all is sent, gets the refusal and not a broken connection.
MOST_DROPPED = 64 << 20

#: All bodies in memory together may have as many bytes as this many of the longest.
_LONGEST_AT_ONCE = 16

#: Lists, objects and texts that a body may hold together. A list is two characters to send and
#: fifty bytes of memory; millions of them take seconds to parse and to look through.
_MOST_PARTS = 100_000

#: Digits and other characters of a number.
_LONGEST_NUMBER = 400

#: How half of a UTF-16 surrogate pair is written in JSON; a whole one begins so, too.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class BodyReader:
    """Reads bodies, and keeps count of those in memory.

    Args:
        max_bytes: of one body.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0

    @asynccontextmanager
    async def body_of(self, request: Request) -> AsyncIterator[bytes]:
        """Yield a request's body; it counts as long as the context lasts.

        Raises:
            ApiError: 413, 415, 408 or 429; 400 if it is empty.
            ClientDisconnect: the client has gone.
        """
        body = bytearray()
        try:
            await self._read_in_time(request, body)
            if not body:
                raise bad_request("the body is empty; send a JSON object")
            _check_type(request)
            yield bytes(body)
        finally:
            self.held -= len(body)

    async def _read_in_time(self, request: Request, body: bytearray) -> None:
        try:
            await asyncio.wait_for(self._read(request, body), _PATIENCE_S)
        except asyncio.TimeoutError:
            raise ApiError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the body did not come within {_PATIENCE_S:g} s; send it at once",
            ) from None

    async def _read(self, request: Request, body: bytearray) -> None:
        announced = request.headers.get("content-length", "0")
        too_long = announced.isdecimal() and int(announced[:20]) > self.max_bytes
        num_dropped = 0
        async for chunk in request.stream():
            too_long = too_long or len(body) + len(chunk) > self.max_bytes
            if too_long:
                self.held -= len(body)
                body.clear()
                num_dropped += len(chunk)
                if num_dropped > MOST_DROPPED:
                    break
                continue
            if self.held + len(chunk) > _LONGEST_AT_ONCE * self.max_bytes:
                raise ApiError(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    f"bodies of {self.held} bytes are being read; try again in 1 s",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                )
            body += chunk
            self.held += len(chunk)
        if too_long:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is over the limit of {self.max_bytes} bytes; send less, or start the "
                "server with a larger --max-body-mb",
                code="body_too_large",
            )


def _check_type(request: Request) -> None:
    # Also keeps web pages of other origins out: a browser asks before it sends this type.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"the body's Content-Type is {kind or 'not given'}; it must be application/json",
        )


def parse(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is.

    Raises:
        ApiError: 400, it is none, holds text that is not Unicode, or too many parts.
    """
    if (num_parts := _num_parts(body)) > _MOST_PARTS:
        raise bad_request(
            f"the body's JSON has {num_parts} lists, objects and texts; it may have {_MOST_PARTS}: "
            "send several requests"
        )
    try:
        value = _DECODER.decode(body.decode())
        if _SURROGATE.search(body):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8: byte {error.start} is wrong") from error
    except UnicodeEncodeError:
        raise bad_request(
            "a text in the body has half a UTF-16 surrogate pair (\\ud800 to \\udfff alone); "
            "send valid Unicode"
        ) from None
    except RecursionError:
        raise bad_request("the body's JSON is nested too deeply") from None
    except ValueError as error:
        raise bad_request(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad_request(f"the body is a JSON {_kind(value)}; it must be an object")
    return value


def _num_parts(body: bytes) -> int:
    """Return how many lists, objects and texts a body has; an upper bound where they are few."""
    most = body.count(b"[") + body.count(b"{") + body.count(b'"')
    if most <= _MOST_PARTS:
        return most
    # What is escaped is in a text, so that the other quotes are around texts.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_texts = plain.count(b'"') // 2
    if num_texts > _MOST_PARTS:
        return num_texts
    outside = b"".join(plain.split(b'"')[::2])
    return num_texts + outside.count(b"[") + outside.count(b"{")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _int(digits: str) -> int:
    _check_number(digits)
    return int(digits)


def _float(digits: str) -> float:
    _check_number(digits)
    return float(digits)


def _check_number(digits: str) -> None:
    if len(digits) > _LONGEST_NUMBER:
        raise ValueError(f"a number has {len(digits)} characters; {_LONGEST_NUMBER} are the most")


_DECODER = json.JSONDecoder(parse_int=_int, parse_float=_float, parse_constant=_refuse_constant)


def _kind(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    names = {list: "array", str: "string", int: "number", float: "number"}
    return names[type(value)]
