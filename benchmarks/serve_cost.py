"""What a server costs beside its engine: CPU time by thread while clients stream.

    python benchmarks/serve_cost.py --clients 64 --tokens 256

A server on the demo model runs in a thread of this process, and another process streams from it
with so many clients at once. Linux says how long each thread ran. `serve` is the event loop,
`tvr-text` parses and encodes, `tvr-engine` steps the engine and hands over: without a server, as
`LLM.generate`, the main thread steps it. `tvr-cpu-device` computes. The clients share the machine,
so times on the clock say little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from tvr import LLM, SamplingParams, demo

PROMPT = "ROMEO:\nWhat light through yonder window breaks? It is the east, and"
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


def thread_times() -> Counter[str]:
    """Return the CPU seconds of this process's threads, by name without their numbers."""
    times: Counter[str] = Counter()
    for thread in threading.enumerate():
        name = re.sub(r"[_-]\d+$", "", thread.name)
        nanoseconds = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
        times[name] += int(nanoseconds) / 1e9
    return times


def fields_of(tokens: int, seed: int) -> dict[str, object]:
    """Return a request's fields, which have the same names in the API and in `SamplingParams`."""
    return {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.8, "seed": seed}


async def stream(port: int, tokens: int, seed: int) -> tuple[int, float]:
    """Ask for an answer; return its events and the seconds to the first one."""
    body = {"model": "demo", "prompt": PROMPT, "stream": True, **fields_of(tokens, seed)}
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    began = time.perf_counter()
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    num_events, first, tail = 0, 0.0, b""
    while not tail.endswith(END):
        received = await reader.read(1 << 16)
        if not received:
            raise ConnectionError(f"the connection ended before the answer did: {tail!r}")
        found = received.count(b'"finish_reason"')
        if found and not num_events:
            first = time.perf_counter() - began
        num_events += found
        tail = (tail + received)[-len(END) :]
    writer.close()
    return num_events, first


async def stream_all(port: int, clients: int, tokens: int) -> None:
    """Let all clients stream at once and print what came."""
    began = time.perf_counter()
    answers = await asyncio.gather(*(stream(port, tokens, i) for i in range(clients)))
    took = time.perf_counter() - began
    firsts = sorted(first for _, first in answers)
    events = sum(num for num, _ in answers)
    print(
        f"{clients} clients, {tokens} tokens each: {events} events in {took:.1f} s, "
        f"{clients * tokens / took:.0f} tokens/s, first after {firsts[len(firsts) // 2]:.2f} s",
        flush=True,
    )


def served(llm: LLM, clients: int, tokens: int) -> Counter[str]:
    """Return the threads' CPU seconds while clients stream from a server."""
    from tvr.serve.server import Server, bind
    from tvr.serve.service import Service
    from tvr.serve.settings import ServeSettings

    with bind("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        server = Server(Service(llm, ServeSettings(model_names=("demo",))), sock)
        ready = threading.Event()
        thread = threading.Thread(target=server.run, args=(ready.set,), name="serve")
        thread.start()
        ready.wait()
        command = [sys.executable, __file__, "--clients", str(clients), "--port", str(port)]
        subprocess.run([*command, "--tokens", "8"], check=True, stdout=subprocess.DEVNULL)
        before = thread_times()
        subprocess.run([*command, "--tokens", str(tokens)], check=True)
        spent = thread_times() - before
        server.stop()
        thread.join()
    return spent


def alone(llm: LLM, clients: int, tokens: int) -> Counter[str]:
    """Return the same of the engine without a server."""
    params = [SamplingParams(**fields_of(tokens, i)) for i in range(clients)]
    before = thread_times()
    llm.generate([PROMPT] * clients, params)
    return thread_times() - before


def main() -> None:
    """Print a table of microseconds a token."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.port is not None:
        asyncio.run(stream_all(args.port, args.clients, args.tokens))
        return
    num_blocks = args.clients * (args.tokens // 16 + 4)
    sizes = {"num_blocks": num_blocks, "max_num_seqs": args.clients}
    with LLM(demo.path(), device="cpu", **sizes) as llm:
        for name, measure in (("tvr serve", served), ("LLM.generate", alone)):
            spent = measure(llm, args.clients, args.tokens)
            print(f"\n{name}, CPU time a token:")
            for thread, seconds in sorted(spent.items()):
                print(f"  {thread:<16} {seconds / args.clients / args.tokens * 1e6:8.1f} us")


if __name__ == "__main__":
    main()
