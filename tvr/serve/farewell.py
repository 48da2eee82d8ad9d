"""What clients are told whose requests are cut off as the server ends."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tvr.serve.errors import ApiError


class Farewell:
    """An ASGI middleware that answers a cancelled request by 503, if its answer has not begun.

    Only the end of the server cancels requests: those whose body never came, or whose client does
    not read.

    Args:
        app: what is behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request."""
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if has_begun:
                raise
            refusal = ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the server is shutting down; the request had not come in time",
                code="shutting_down",
            )
            await refusal.response()(scope, receive, send)
