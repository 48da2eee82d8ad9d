"""Errors as OpenAI's clients read them: a status and `{"error": {...}}`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.responses import Response

from tvr.errors import TvrError
from tvr.serve.json_answer import json_text

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

    def __reduce__(self) -> tuple[Any, ...]:
        """Let it come from another process."""
        more = partial(ApiError, param=self.param, code=self.code, headers=self.headers)
        return more, (self.status, str(self))

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


def check_model(name: str, served: tuple[str, ...]) -> None:
    """Raise a 404 if a request asks for a model that is not `served`."""
    if name not in served:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"there is no model {name!r}; this server has {', '.join(served)}",
            param="model",
            code="model_not_found",
        )


def encode_json(content: object) -> bytes:
    """Return `content` as JSON; escapes keep it ASCII, whatever a client has sent."""
    return json_text(content).encode()


def json_response(
    content: object, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """Return `content` as a response of JSON."""
    return Response(encode_json(content), status, headers, media_type="application/json")
