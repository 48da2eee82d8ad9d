"""Whether a server holds out: many clients, some of whom leave, and nothing may be left of them.

    python benchmarks/soak.py OUT.json [--requests 10000] [--clients 64]

`tvr serve` has the demo model in float32, where an answer depends on nothing but its request, and
half the rows that the clients ask for, so requests queue. They come in turns of a thousand, of
mixed lengths (prompts of 1 to 304 tokens, answers of 1 to 32), greedy and with seeds, one answer or
two, streamed or whole. Three in ten leave: in the middle of a stream, while they wait for a whole
answer, or at once. Every answer that is complete must be what the engine gives without a server.

After each turn no block may be in use and no request be left; the server's resident memory, open
files and threads are noted. Exit code 1: any of that fails, or in the second half of the turns the
server came to hold more files or threads, or 16 MiB more memory, or it does not end by SIGTERM with
0. Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import torch

from tvr import LLM, SamplingParams, demo
from tvr.bench.report import write_json
from tvr.bench.serve_sse import DONE, EventReader

TURN = 1000
MOST_GROWTH_MIB = 16
NUM_QUESTIONS = 500
DTYPE = "float32"
#: What a client does, and how many of ten do so.
WAYS = {"whole": 3.5, "stream": 3.5, "leaves a stream": 1, "leaves waiting": 1, "leaves at once": 1}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "stop": ["\n"]},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 40, "n": 2},
    {"temperature": 0.8, "presence_penalty": 0.5, "min_p": 0.02},
)

Answer = list[tuple[str, str]]  # text and finish reason of each choice


@dataclass(frozen=True, kw_only=True)
class Question:
    """A request, and its answer without a server."""

    prompt: list[int]
    fields: dict[str, Any]
    answer: Answer


@dataclass(kw_only=True)
class Tally:
    """What has come of the requests."""

    ways: Counter[str] = field(default_factory=Counter)
    equal: int = 0
    faults: list[str] = field(default_factory=list)


def questions() -> list[Question]:
    """Return different requests, answered by the engine itself."""
    rng = random.Random(0)
    common = [rng.randrange(2, 2048) for _ in range(64)]
    prompts, fields = [], []
    for number in range(NUM_QUESTIONS):
        own = [rng.randrange(2, 2048) for _ in range(rng.randint(1, 240))]
        prompts.append(common + own if number % 4 == 0 else own)
        kind = KINDS[number % len(KINDS)]
        fields.append({**kind, "max_tokens": rng.randint(1, 32), "seed": number})
    with LLM(demo.path(), device="cpu", dtype=DTYPE) as llm:
        outputs = llm.generate(prompts, [SamplingParams(**given) for given in fields])
    answers = [[(o.text, o.finish_reason or "") for o in output.outputs] for output in outputs]
    rows = zip(prompts, fields, answers, strict=True)
    return [Question(prompt=p, fields=f, answer=a) for p, f, a in rows]


@contextmanager
def server() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield a server's URL and its process."""
    command = [sys.executable, "-m", "tvr", "serve", "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--dtype", DTYPE, "--served-model-name", "demo"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None, "piped"
    try:
        for line in process.stderr:
            if found := re.search(r"is served at (\S+)$", line):
                yield found[1], process
                return
        sys.exit("the server did not start")
    finally:
        process.kill()
        process.communicate()


@asynccontextmanager
async def asking(client: httpx2.AsyncClient, body: dict[str, Any]) -> AsyncIterator[Any]:
    """Yield the response to a request, whose connection is closed at the end if it is not over."""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx2.codes.OK:
            raise ValueError(f"{response.status_code}: {(await response.aread())[:200]!r}")
        yield response


async def whole(client: httpx2.AsyncClient, body: dict[str, Any]) -> Answer:
    """Return an answer that comes at once."""
    async with asking(client, body) as response:
        answer = json.loads(await response.aread())
    return [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]


async def stream(client: httpx2.AsyncClient, body: dict[str, Any], most: int) -> Answer | None:
    """Return an answer that comes in pieces; None if that would take more than `most` of them."""
    texts = [""] * body.get("n", 1)
    reasons = [""] * len(texts)
    events = EventReader()
    async with asking(client, {**body, "stream": True}) as response:
        async for received in response.aiter_bytes():
            for event in events.feed(received):
                if event == DONE:
                    return list(zip(texts, reasons, strict=True))
                for choice in json.loads(event)["choices"]:
                    texts[choice["index"]] += choice["text"]
                    reasons[choice["index"]] = choice["finish_reason"] or ""
                most -= 1
                if most < 0:
                    return None
    raise ValueError("the stream ended without [DONE]")


async def ask(
    client: httpx2.AsyncClient, question: Question, rng: random.Random, tally: Tally
) -> None:
    """Send one request in one of the ways, and judge what comes back."""
    (way,) = rng.choices(list(WAYS), list(WAYS.values()))
    tally.ways[way] += 1
    body = {"model": "demo", "prompt": question.prompt, **question.fields}
    try:
        if way == "whole":
            answer = await whole(client, body)
        elif way == "stream":
            answer = await stream(client, body, sys.maxsize)
        elif way == "leaves a stream":
            answer = await stream(client, body, rng.randint(0, 5))
        else:
            patience = rng.uniform(0.02, 0.5) if way == "leaves waiting" else rng.uniform(0, 0.01)
            answer = await asyncio.wait_for(whole(client, body), patience)
    except asyncio.TimeoutError:
        return
    except (ValueError, httpx2.HTTPError) as error:
        tally.faults.append(f"{way}: {type(error).__name__}: {error}")
        return
    if answer is None:
        return
    if answer == question.answer:
        tally.equal += 1
    else:
        tally.faults.append(f"{question.fields} gave {answer}, not {question.answer}")


async def turn(url: str, asked: list[Question], clients: int, seed: int, tally: Tally) -> None:
    """Serve a turn's requests, so many at once."""
    left = iter(asked)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)

    async def one(number: int) -> None:
        rng = random.Random(seed * clients + number)
        async with httpx2.AsyncClient(
            base_url=url, limits=limits, timeout=300, trust_env=False
        ) as client:
            for question in left:
                await ask(client, question, rng, tally)

    await asyncio.gather(*map(one, range(clients)))


def state_of(url: str, pid: int) -> dict[str, float]:
    """Return what the server holds."""
    text = httpx2.get(f"{url}/metrics", trust_env=False).text
    values = dict(re.findall(r"^([a-z_:]+)(?:\{.*\})? (\S+)$", text, re.MULTILINE))
    status = Path(f"/proc/{pid}/status").read_text()
    (threads,) = re.findall(r"^Threads:\s+(\d+)", status, re.MULTILINE)
    requests = sum(float(values[f"tvr:num_requests_{kind}"]) for kind in ("running", "waiting"))
    return {
        "memory_mib": float(values["process_resident_memory_bytes"]) / 2**20,
        "files": float(values["process_open_fds"]),
        "threads": float(threads),
        "requests": requests,
        "kv_use": float(values["tvr:kv_cache_usage_perc"]),
        "tokens": float(values["tvr:generation_tokens_total"]),
        "preemptions": float(values["tvr:num_preemptions_total"]),
    }


def settled_state(url: str, pid: int) -> dict[str, float]:
    """Return the same a second after the last client has gone."""
    time.sleep(1.0)
    return state_of(url, pid)


def faults_in(turns: list[dict[str, float]]) -> list[str]:
    """Return what was left after a turn, and what grew in the second half of them."""
    kept = [
        f"after turn {number}, {name} is {row[name]}"
        for number, row in enumerate(turns, 1)
        for name in ("requests", "kv_use")
        if row[name]
    ]
    middle, last = turns[(len(turns) - 1) // 2], turns[-1]
    most = {"memory_mib": MOST_GROWTH_MIB, "files": 0, "threads": 0}
    grown = [
        f"{name} grew from {middle[name]:.1f} to {last[name]:.1f}"
        for name, limit in most.items()
        if last[name] > middle[name] + limit
    ]
    return kept + grown


def main(argv: list[str] | None = None) -> int:
    """Run it all; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=64)
    asked = parser.parse_args(argv)
    pool = questions()
    rng = random.Random(1)
    tally = Tally()
    turns: list[dict[str, float]] = []
    with server() as (url, process):
        for first in range(0, asked.requests, TURN):
            began = time.perf_counter()
            drawn = rng.choices(pool, k=min(TURN, asked.requests - first))
            asyncio.run(turn(url, drawn, asked.clients, first, tally))
            seconds = time.perf_counter() - began
            turns.append({**settled_state(url, process.pid), "seconds": seconds})
            print({name: round(value, 2) for name, value in turns[-1].items()}, file=sys.stderr)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    faults = [*tally.faults, *faults_in(turns)]
    if code:
        faults.append(f"after SIGTERM the exit code is {code}")
    header = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": " ".join(["python", "benchmarks/soak.py", *(argv or sys.argv[1:])]),
        "requests": sum(tally.ways.values()),
        "clients": asked.clients,
        "ways": dict(tally.ways),
        "completed_and_equal": tally.equal,
        "faults": faults,
    }
    write_json(asked.out, header, turns)
    for fault in faults[:20]:
        print(fault, file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
