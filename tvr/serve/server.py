"""The process around a service: its socket, its signals and its end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from http import HTTPStatus
from types import FrameType

import uvicorn

from tvr.errors import ConfigError, KernelError
from tvr.serve.app import create_app
from tvr.serve.errors import ApiError
from tvr.serve.farewell import Farewell
from tvr.serve.gate import Gate
from tvr.serve.listener import Listener
from tvr.serve.protocol import PatientProtocol
from tvr.serve.service import Service

#: Seconds between the end of the time to drain, or a fault, and the end of connections: clients
#: are told in them.
_FAREWELL_S = 2

#: Seconds that clients are told in when it ends at once.
_LAST_WORDS_S = 0.2

#: Where uvicorn tells of faults.
_LOG = "uvicorn.error"

_log = logging.getLogger("tvr.serve")

_LARGEST_PORT = 65535

#: Connections that may wait to be accepted, as uvicorn has it.
_MOST_PENDING = 2048

#: Seconds that a thread may run while others wait for Python's lock. The event loop waits for it
#: after each of its calls to the system, behind all other threads; Python's 5 ms add up.
_SWITCH_S = 0.0005

#: Seconds that the engine's thread may take for its last step.
_LAST_STEP_S = 30.0

#: Seconds between looks at what gives no notice.
_LOOK_S = 0.01


class _NoCancellations(logging.Filter):
    """Keeps requests that are cut off at the end out of the log: they are no faults."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, asyncio.CancelledError)


class _Uvicorn(uvicorn.Server):
    """Leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Server:
    """Serves until it is asked to stop.

    Args:
        service: what it serves.
        sock: bound, not listening yet.

    Attributes:
        interrupted: it was Ctrl-C that asked it to stop.
    """

    def __init__(self, service: Service, sock: socket.socket) -> None:
        self.service = service
        self.interrupted = False
        self._sock = sock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waits_for_step = False
        drain_s = service.settings.drain_s
        gate = Gate(create_app(service), service.settings.api_keys, is_local=_is_local(sock))
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                Farewell(Listener(gate)),  # who is cut off is not heard out
                http=PatientProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(drain_s) + _FAREWELL_S,
            )
        )

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve; in the main thread, signals ask to stop.

        Args:
            on_ready: called once clients may connect.

        Raises:
            ConfigError: another server has taken the address meanwhile.
            KernelError: the engine failed for good, or a step of it does not end. Do not wait for
                it: closing the engine would.
        """
        try:
            self._sock.listen(_MOST_PENDING)
        except OSError as error:
            raise ConfigError(
                f"{url_of(self._sock)} has been taken meanwhile: {error}; choose another --port, "
                "or 0 for a free one"
            ) from error
        log, silence = logging.getLogger(_LOG), _NoCancellations()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        log.addFilter(silence)
        try:
            asyncio.run(self._serve(on_ready))
        finally:
            log.removeFilter(silence)
            sys.setswitchinterval(interval)

    def stop(self) -> None:
        """Take no more requests and end when those there are have ended, or their time is over.

        A second call ends at once, but for a step of the engine; a third does not wait for that
        either. May be called from any thread.
        """
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._begin_to_stop)

    async def _serve(self, on_ready: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.service.on_fatal = self._end_by_fault
        self.service.start()
        ready = asyncio.create_task(self._tell(on_ready))
        with self._signals():
            try:
                await self._uvicorn.serve(sockets=[self._sock])
            finally:
                ready.cancel()
                why_not = await self._end_engine()
                self._loop = None
        if self.service.engine.fatal is not None:
            raise KernelError(f"the engine has ended: {self.service.engine.fatal}")
        if why_not is not None:
            raise KernelError(why_not)

    async def _end_engine(self) -> str | None:
        """End the service's threads; return why the engine's has not ended, None if it has."""
        self._waits_for_step = True
        await asyncio.to_thread(self.service.stop)
        end = time.monotonic() + _LAST_STEP_S
        while not self.service.engine.has_ended:  # its thread may be in the middle of a step
            if not self._waits_for_step:
                return "a step of the engine had not ended when the server was told to end at once"
            if time.monotonic() > end:
                return f"a step of the engine did not end within {_LAST_STEP_S:g} s"
            await asyncio.sleep(_LOOK_S)
        return None

    async def _tell(self, on_ready: Callable[[], None]) -> None:
        while not self._uvicorn.started:
            await asyncio.sleep(_LOOK_S)
        on_ready()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = number == signal.SIGINT
        self.stop()

    def _begin_to_stop(self) -> None:
        assert self._loop is not None, "only it calls this"
        if self._waits_for_step:
            self._waits_for_step = False
            return
        if self._uvicorn.should_exit:
            self._end_at_once(self._loop)
            return
        self._uvicorn.should_exit = True
        self._loop.call_later(self.service.settings.drain_s, self._end_by_time)

    def _end_at_once(self, loop: asyncio.AbstractEventLoop) -> None:
        num = len(self.service.jobs)
        _log.warning("asked to stop again; requests that are cut off: %d", num)
        self.service.fail_all(
            ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the server was told to end at once; the answer is not complete",
                code="shutting_down",
            )
        )
        loop.call_later(_LAST_WORDS_S, setattr, self._uvicorn, "force_exit", True)

    def _end_by_time(self) -> None:
        drain_s = self.service.settings.drain_s
        self.service.fail_all(
            ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the server is shutting down; the answer was not complete within {drain_s:g} s",
                code="shutting_down",
            )
        )

    def _end_by_fault(self) -> None:
        self._uvicorn.config.timeout_graceful_shutdown = _FAREWELL_S
        self._uvicorn.should_exit = True


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that has the address and does not listen yet: until then nobody connects.

    Raises:
        ConfigError: it cannot be had.
    """
    if not 0 <= port <= _LARGEST_PORT:
        raise ConfigError(f"--port {port} is no port; it must be from 0, any, to {_LARGEST_PORT}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host} is no address: {error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"{host}:{port} cannot be served: {error}; choose another --port, or 0 for a free one"
        ) from error
    return sock


def _is_local(sock: socket.socket) -> bool:
    """Whether only the same machine can connect."""
    return ipaddress.ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback


def url_of(sock: socket.socket) -> str:
    """Return where a socket's server is found."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
