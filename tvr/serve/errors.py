"""Errors as OpenAI's clients read them: a status and `{"error": {...}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from tvr.errors import TvrError

#: Items of a list that are encoded at a time.
_PIECE = 10_000

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

_KINDS = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


class ApiError(TvrError):
    """What a client is told in place of an answer.

    Attributes:
        status: of HTTP.
        param: the field at fault.
        code: a word for programs.
        headers: more headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        server = self.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        kind = "server_error" if server else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": _KINDS.get(HTTPStatus(self.status), kind),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> Response:
        """Return the error as a response."""
        return json_response(self.body, self.status, self.headers)


def bad_request(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error of a request that can never be served as asked."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def long_json_response(content: Mapping[str, Any]) -> Response:
    """Return an object with lists of any length as JSON; other threads can run meanwhile.

    The encoder keeps Python's lock for as long as a call takes.
    """
    fields = []
    for name, value in content.items():
        if isinstance(value, list):
            starts = range(0, len(value), _PIECE)
            pieces = [_encode(value[start : start + _PIECE])[1:-1] for start in starts]
            text = f"[{','.join(pieces)}]"
        else:
            text = _encode(value)
        fields.append(f"{_encode(name)}:{text}")
    return Response("{" + ",".join(fields) + "}", media_type="application/json")


def json_response(
    content: object, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """Return `content` as JSON; escapes keep it ASCII, whatever a client has sent."""
    return Response(_encode(content), status, headers, media_type="application/json")
