"""A small server that speaks as OpenAI's does, with a timing of its own, on a real socket."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

#: Text with characters at which Python would break a line, and JSON does not.
TEXT = " a\u2028b\x85"


@dataclass(kw_only=True)
class FakeServer:
    """How the server answers, and what it has seen.

    Attributes:
        first_s, gap_s: seconds before the first chunk, and between two.
        chunk_tokens: tokens of a chunk.
        counts_each: whether each chunk says how many tokens there are so far, if it is asked to.
        usage: whether the last event says it.
        takes: returns why a body is refused, as (status, message); None: it is not.
        cut: returns after how many chunks the connection of request number i ends; None: never.
        trick: returns events to send in place of all others; None: none.
    """

    first_s: float = 0.0
    gap_s: float = 0.0
    chunk_tokens: int = 1
    counts_each: bool = True
    usage: bool = True
    takes: Callable[[int, dict], tuple[int, object] | None] = lambda i, body: None
    cut: Callable[[int], int | None] = lambda i: None
    trick: Callable[[int], list[bytes] | None] = lambda i: None
    url: str = ""
    bodies: list[dict] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    came: list[float] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def handle(self, reader, writer) -> None:
        try:
            while True:
                await self._one(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader, writer) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:]) if k}
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        if head[0].startswith("GET /v1/models"):
            _respond(writer, 200, {"object": "list", "data": [{"id": "small"}]})
            return
        asked, number = json.loads(body), len(self.bodies)
        self.bodies.append({**asked, "path": head[0].split()[1]})
        self.keys.append(fields.get("authorization"))
        self.came.append(time.perf_counter())
        if (refusal := self.takes(number, asked)) is not None:
            _respond(writer, *refusal)
            return
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            writer.write(_HEAD)
            await self._stream(number, asked, writer)
        finally:
            self.at_once -= 1

    async def _stream(self, number, asked, writer) -> None:
        for event in self.trick(number) or ():
            _event(writer, event)
        if self.trick(number) is None:
            prompt = asked.get("prompt") or asked["messages"][0]["content"].split()
            num_tokens, made, chunk = asked["max_tokens"], 0, 0
            each = self.counts_each and asked["stream_options"].get("continuous_usage_stats")
            due = time.perf_counter() + self.first_s
            while made < num_tokens:
                await asyncio.sleep(due - time.perf_counter())
                due += self.gap_s  # no drift
                if chunk == self.cut(number):
                    raise ConnectionError
                made, chunk = min(made + self.chunk_tokens, num_tokens), chunk + 1
                usage = {"prompt_tokens": len(prompt), "completion_tokens": made}
                event = {"choices": [_choice(asked, TEXT, made == num_tokens)]}
                _event(writer, {**event, **({"usage": usage} if each else {})})
                await writer.drain()
            if self.usage:
                _event(writer, {"choices": [], "usage": usage})
            _event(writer, b"[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


_TOLD = b"HTTP/1.1 %d Told\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _choice(asked, text, is_last) -> dict:
    said = {"delta": {"content": text}} if "messages" in asked else {"text": text}
    return {"index": 0, **said, "finish_reason": "length" if is_last else None}


def _event(writer, event) -> None:
    payload = event if isinstance(event, bytes) else json.dumps(event, ensure_ascii=False).encode()
    data = b"data: " + payload + b"\n\n"
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _respond(writer, status, said) -> None:
    body = said.encode() if isinstance(said, str) else json.dumps(said).encode()
    writer.write(_TOLD % (status, len(body), body))


@contextmanager
def running(server: FakeServer):
    """Serve in a thread of its own; `server.url` says where."""
    loop = asyncio.new_event_loop()

    async def start():
        return await asyncio.start_server(server.handle, "127.0.0.1", 0, backlog=512)

    async def stop():
        listener.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    listener = loop.run_until_complete(start())
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
