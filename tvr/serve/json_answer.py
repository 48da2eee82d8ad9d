"""A whole answer, which may be long."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

#: Bytes that are sent at a time; a socket takes them in less than a millisecond.
_PIECE = 1 << 18


class JsonAnswer(Response):
    """JSON that is sent piece by piece; others have their turn in between.

    Args:
        content: encoded already.
    """

    media_type = "application/json"

    def __init__(self, content: bytes) -> None:
        super().__init__(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything."""
        head = {"type": "http.response.start", "status": HTTPStatus.OK, "headers": self.raw_headers}
        await send(head)
        for start in range(0, len(self.body), _PIECE):
            piece = self.body[start : start + _PIECE]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
