"""HTTP as uvicorn speaks it, with an end to waiting for requests that do not come."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

#: Seconds that the head of a request may take; between one such time and two of them.
_PATIENCE_S = 30.0


class PatientProtocol(H11Protocol):
    """Closes a connection whose client has sent no head of a request, or half of one.

    uvicorn waits for ever, and each such connection holds a file handle until there are none.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._seen: object = self  # no cycle
        self._look = self.loop.call_later(_PATIENCE_S, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._look.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self) -> None:
        """Close the connection if it has waited for the same request since the last look."""
        waits = self.conn.their_state is h11.IDLE
        if waits and self._seen is self.cycle:
            self.transport.close()
            return
        self._seen = self.cycle if waits else self
        self._look = self.loop.call_later(_PATIENCE_S, self._close_if_idle)
