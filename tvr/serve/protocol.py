"""HTTP as uvicorn speaks it, with an end to waiting for clients that neither send nor read."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Seconds that the head of a request may take; between one such time and two of them.
_PATIENCE_S = 30.0

#: Seconds in which a client must take something of an answer that waits for it.
_READ_PATIENCE_S = 300.0


class PatientProtocol(H11Protocol):
    """Closes a connection whose client has sent no head of a request, or half of one.

    Also one whose client takes nothing of its answer. uvicorn waits for ever, and each such
    connection holds a file handle until there are none, and memory for the answer.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._seen: object = self  # no cycle
        self._look = self.loop.call_later(_PATIENCE_S, self._close_if_idle)
        self._unread: asyncio.TimerHandle | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._look.cancel()
        self._forget_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """See `asyncio.BaseProtocol`: much waits to be sent."""
        super().pause_writing()
        self._look_at_unread()

    def resume_writing(self) -> None:
        """See `asyncio.BaseProtocol`."""
        self._forget_unread()
        super().resume_writing()

    def _look_at_unread(self) -> None:
        size = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(_READ_PATIENCE_S, self._close_if_unread, size)

    def _close_if_unread(self, size: int) -> None:
        """Close the connection if as much waits to be sent as at the last look, or more."""
        if self.transport.get_write_buffer_size() < size:
            self._look_at_unread()
        else:
            self.transport.abort()  # an ordinary end would wait for the client

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _close_if_idle(self) -> None:
        """Close the connection if it has waited for the same request since the last look."""
        waits = self.conn.their_state is h11.IDLE
        if waits and self._seen is self.cycle:
            self.transport.close()
            return
        self._seen = self.cycle if waits else self
        self._look = self.loop.call_later(_PATIENCE_S, self._close_if_idle)
