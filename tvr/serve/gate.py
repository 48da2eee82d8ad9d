"""Who may come in: every route but `/health` asks for a key, if there is one."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from http import HTTPStatus

from starlette.types import ASGIApp, Receive, Scope, Send

from tvr.serve.errors import ApiError

#: The one route that is open to all.
OPEN_PATH = "/health"

#: The route that people open in a browser, which is told to ask them for the key.
_PAGE_PATH = "/"


class Gate:
    """An ASGI middleware before everything else, so that there is no way around it.

    It looks at the path exactly as the router does; what is not literally `/health` is closed,
    whether such a route exists or not. A key comes as a bearer token, or as the password of HTTP's
    Basic authentication, which is how a browser has it from its user.

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
        is_page = scope["type"] == "http" and scope["path"] == _PAGE_PATH
        refusal = ApiError(
            HTTPStatus.UNAUTHORIZED,
            "this server asks for an API key; send it as 'Authorization: Bearer KEY', or in a "
            "browser as the password, with any name",
            code="invalid_api_key",
            headers={
                "WWW-Authenticate": 'Basic realm="tvr", charset="UTF-8"' if is_page else "Bearer"
            },
        )
        await refusal.response()(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        values = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, credentials = values[0].partition(b" ")
        key = _key_of(scheme.lower(), credentials.strip())
        if key is None:
            return False
        digest = _digest(key)
        # All keys are compared, and each in constant time.
        return any([hmac.compare_digest(digest, known) for known in self._digests])


def _key_of(scheme: bytes, credentials: bytes) -> bytes | None:
    """Return the key that a header brings; None: it brings none."""
    if scheme == b"bearer":
        return credentials
    if scheme != b"basic":
        return None
    try:
        name_and_password = base64.b64decode(credentials, validate=True)
    except binascii.Error:
        return None
    _, colon, password = name_and_password.partition(b":")
    return password if colon else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
