"""Hearing clients out that are refused while they still send."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tvr.serve.body import MOST_DROPPED

#: Seconds in which the rest of a body must come.
_PATIENCE_S = 10.0


class Listener:
    """An ASGI middleware that answers behind the body where the connection ends with the answer.

    A connection that is closed while its client still sends is reset, and the answer is lost: a
    key that is wrong or a queue that is full would look like a server that is gone. Clients with
    `Connection: close`, or of HTTP/1.0 as proxies often are, would see that.

    Args:
        app: what is behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request."""
        if not _sends_and_closes(scope):
            await self._app(scope, receive, send)
            return
        more = True

        async def watched() -> Message:
            nonlocal more
            message = await receive()
            more = message.get("more_body", False)
            return message

        async def drop() -> None:
            num = 0
            while more and num < MOST_DROPPED:
                num += len((await watched()).get("body", b""))

        async def behind(message: Message) -> None:
            nonlocal more
            if more:
                try:
                    await asyncio.wait_for(drop(), _PATIENCE_S)
                except asyncio.TimeoutError:
                    more = False  # it has been waited for
            await send(message)

        await self._app(scope, watched, behind)


def _sends_and_closes(scope: Scope) -> bool:
    """Whether a request has a body that its client sends unasked, on a connection that ends."""
    headers = dict(scope["headers"])
    closes = scope["http_version"] == "1.0" or b"close" in headers.get(b"connection", b"").lower()
    has_body = b"content-length" in headers or b"transfer-encoding" in headers
    return closes and has_body and b"expect" not in headers
