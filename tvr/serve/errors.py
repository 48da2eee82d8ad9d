"""Errors as OpenAI's clients read them: a status and `{"error": {...}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from tvr.errors import TvrError

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


def json_response(
    content: object, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """Return `content` as JSON; escapes keep it ASCII, whatever a client has sent."""
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    return Response(body, status, headers, media_type="application/json")
