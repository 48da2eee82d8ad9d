"""Who may come in: every route but `/health` asks for a key, if there is one."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
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

    Without keys, a server for its own machine alone refuses a Host that is another name: a web
    page whose name its owner lets point here would be of the same origin for a browser.

    Args:
        app: what is behind it.
        api_keys: any of them opens; none: all may come in.
        is_local: the server listens on a loopback address.
    """

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], *, is_local: bool) -> None:
        self._app = app
        self._asks_for_host = is_local and not api_keys
        # Digests have one length, so that a comparison tells nothing about a key's.
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that may come in, refuse another."""
        refusal = None if _has_path(scope, OPEN_PATH) else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self._asks_for_host and not all(map(_is_own_name, _headers(scope, b"host"))):
            return ApiError(
                HTTPStatus.FORBIDDEN,
                "this server has no key and is for its own machine; the request's Host is another "
                "name: ask for localhost or an address, or start the server with --api-key",
                code="foreign_host",
            )
        if not self._digests or self._has_key(scope):
            return None
        is_page = _has_path(scope, _PAGE_PATH)
        return ApiError(
            HTTPStatus.UNAUTHORIZED,
            "this server asks for an API key; send it as 'Authorization: Bearer KEY', or in a "
            "browser as the password, with any name",
            code="invalid_api_key",
            headers={
                "WWW-Authenticate": 'Basic realm="tvr", charset="UTF-8"' if is_page else "Bearer"
            },
        )

    def _has_key(self, scope: Scope) -> bool:
        values = _headers(scope, b"authorization")
        if len(values) != 1:
            return False
        scheme, _, credentials = values[0].partition(b" ")
        key = _key_of(scheme.lower(), credentials.strip())
        if key is None:
            return False
        digest = _digest(key)
        # All keys are compared, and each in constant time.
        return any([hmac.compare_digest(digest, known) for known in self._digests])


def _has_path(scope: Scope, path: str) -> bool:
    return bool(scope["type"] == "http" and scope["path"] == path)


def _headers(scope: Scope, wanted: bytes) -> list[bytes]:
    return [value for name, value in scope.get("headers", ()) if name == wanted]


def _is_own_name(host: bytes) -> bool:
    """Whether a Host is localhost or an address, with or without a port."""
    name, colon, port = host.decode("latin-1").lower().rpartition(":")
    if not colon or not port.isdecimal():
        name = host.decode("latin-1").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


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
