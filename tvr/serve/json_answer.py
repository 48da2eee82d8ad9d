"""JSON as it is sent, and a whole answer of it, which may be long."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

#: Escapes keep it ASCII, whatever a client has sent.
json_text = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

#: Items of a list that are encoded at a time. With twenty log-probabilities each, that takes a
#: millisecond or two.
_ITEMS = 64

#: Bytes that are sent at a time; a socket takes them in less than a millisecond.
_PIECE = 1 << 18


def encode_long(content: object) -> str:
    """Return `content` as JSON; its long lists are encoded piece by piece.

    A call of the encoder keeps Python's lock: for a second where an answer of some ten thousand
    tokens has log-probabilities.
    """
    if isinstance(content, dict):
        fields = (f"{json_text(str(name))}:{encode_long(value)}" for name, value in content.items())
        return f"{{{','.join(fields)}}}"
    if isinstance(content, list):
        if len(content) <= _ITEMS:
            return f"[{','.join(map(encode_long, content))}]"
        starts = range(0, len(content), _ITEMS)
        return f"[{','.join(json_text(content[i : i + _ITEMS])[1:-1] for i in starts)}]"
    return json_text(content)


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
