"""Server-sent events, as a server's answer brings them in pieces cut anywhere."""

from __future__ import annotations

from collections.abc import Iterator

#: The payload that ends a stream of an OpenAI-compatible server.
DONE = b"[DONE]"


class EventReader:
    """Takes the bytes of a stream and gives the payloads of its events.

    Lines are split as bytes: text may hold characters that Python counts as line breaks, and
    JSON does not.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the payload of each event that `received` completes."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data.clear()
