"""HTTP as uvicorn speaks it, with an end to waiting for clients that neither send nor read."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Seconds that the head of a request may take; between one such time and two of them.
_PATIENCE_S = 30.0

#: Seconds in which a client must take something of an answer that waits for it.
_READ_PATIENCE_S = 300.0

#: Bytes that are read behind a request while it is answered. If none were, nobody would see its
#: client leave.
_MOST_AHEAD = 1 << 16


class PatientProtocol(H11Protocol):
    """Closes a connection whose client has sent no head of a request, or half of one.

    Also one whose client takes nothing of its answer, or has it and goes on sending a body that
    nobody wants. uvicorn waits for ever, and each such connection holds a file handle until there
    are none, and memory for the answer.
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

    def handle_events(self) -> None:
        """Deal with what has come; see `asyncio.Protocol.data_received`."""
        super().handle_events()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < _MOST_AHEAD:
            self.flow.resume_reading()

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
        answered = self.cycle is not None and self.cycle.response_complete
        waits = answered or self.conn.their_state is h11.IDLE
        if self.transport.is_closing():  # once what waits to be sent is
            if self._unread is None:
                self._look_at_unread()
        elif waits and self._seen is self.cycle:
            self.transport.close()
        self._seen = self.cycle if waits else self
        self._look = self.loop.call_later(_PATIENCE_S, self._close_if_idle)
