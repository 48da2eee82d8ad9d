"""Who may come in: every route but `/health` asks for a key, if there is one."""

from __future__ import annotations

import hashlib
import hmac
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from tvr.serve.errors import ApiError

#: The one route that is open to all.
OPEN_PATH = "/health"


class Gate:
    """An ASGI middleware before everything else, so that there is no way around it.

    It looks at the path exactly as the router does; what is not literally `/health` is closed,
    whether such a route exists or not.

    Args:
        app: what is behind it.
        api_keys: any of them opens; none: all may come in.
    """

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self._app = app
        # Digests have one length, so that a comparison tells nothing about a key's.
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that may come in, refuse another."""
        is_open = not self._digests or (scope["type"] == "http" and scope["path"] == OPEN_PATH)
        if is_open or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            HTTPStatus.UNAUTHORIZED,
            "this server asks for an API key; send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response()(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        values = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, key = values[0].partition(b" ")
        digest = _digest(key.strip())
        # All keys are compared, and each in constant time.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
