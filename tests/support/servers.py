"""Servers on real sockets, in a thread of the test's process, and clients for them."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tvr import LLM
from tvr.serve.server import Server, bind, url_of
from tvr.serve.service import Service
from tvr.serve.settings import ServeSettings

#: The name that models are served by.
MODEL = "small"


@dataclass(kw_only=True)
class Reply:
    """What a server answered to a plain request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, whose form is checked."""
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        assert "\n" not in error["message"]
        return error


@dataclass(kw_only=True)
class Running:
    """A server that runs, and its engine."""

    llm: LLM
    server: Server
    service: Service
    url: str
    thread: threading.Thread

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def openai(self, **settings: Any) -> Any:
        """Return OpenAI's own client."""
        import openai

        more = {"api_key": "unused", "max_retries": 0, "timeout": 60, **settings}
        return openai.OpenAI(base_url=f"{self.url}/v1", **more)

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
        timeout: float = 60,
    ) -> Reply:
        """Send one request; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if data is not None else {}
        connection = HTTPConnection(*self.address, timeout=timeout)
        try:
            connection.request(method, path, data, sent | (headers or {}))
            response = connection.getresponse()
            fields = {name.lower(): value for name, value in response.getheaders()}
            return Reply(status=response.status, headers=fields, body=response.read())
        finally:
            connection.close()

    def post(self, path: str, body: object, **more: Any) -> Reply:
        return self.ask("POST", path, body, **more)

    def get(self, path: str, **more: Any) -> Reply:
        return self.ask("GET", path, **more)

    def begin(self, path: str, body: object) -> socket.socket:
        """Send a request and return the socket, on which the answer will come."""
        data = json.dumps(body).encode()
        sock = socket.create_connection(self.address, timeout=60)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return sock

    def metric(self, name: str, **labels: str) -> float:
        """Return one value of `/metrics`."""
        wanted = {"model_name": MODEL, **labels}
        for line in self.get("/metrics").body.decode().splitlines():
            found, _, value = line.rpartition(" ")
            if found.startswith(f"tvr:{name}{{") and all(
                f'{key}="{item}"' in found for key, item in wanted.items()
            ):
                return float(value)
        raise AssertionError(f"no metric {name} with {wanted}")

    def is_idle(self) -> bool:
        """Whether nothing of any request is left."""
        stats = self.llm.stats()
        return (
            not self.service.jobs
            and self.service.admission.taken == 0
            and self.service.engine.num_followed == 0
            and not self.llm.has_unfinished_requests()
            and stats["num_used_blocks"] == stats["num_running"] == stats["num_waiting"] == 0
        )


def wait_until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until `condition` holds; fail if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to be in time"
        time.sleep(0.005)


@contextmanager
def serving(path: Path, engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    """Serve a model under the name `MODEL`; at the end the server must stop on its own."""
    llm = LLM(path, **{"device": "cpu", **(engine or {})})
    names = {"model_names": (MODEL,), "drain_s": 5.0}
    with llm, bind("127.0.0.1", 0) as sock:
        service = Service(llm, ServeSettings(**{**names, **settings}))
        server = Server(service, sock)
        url = url_of(sock)
        ready = threading.Event()
        failures: list[BaseException] = []

        def run() -> None:
            try:
                server.run(ready.set)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert ready.wait(30), failures
        running = Running(llm=llm, server=server, service=service, url=url, thread=thread)
        try:
            yield running
        finally:
            server.stop()
            thread.join(60)
            assert not thread.is_alive()
        if failures:
            raise failures[0]


def events_of(body: bytes) -> list[Any]:
    """Return the payloads of a stream's events; the last one may be "[DONE]"."""
    assert body.endswith(b"\n\n")
    events = []
    for event in body.decode().removesuffix("\n\n").split("\n\n"):
        assert event.startswith("data: ")
        payload = event.removeprefix("data: ")
        events.append(payload if payload == "[DONE]" else json.loads(payload))
    return events
