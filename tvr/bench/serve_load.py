"""Puts load on a server: when requests come, and how many may be under way."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count, cycle
from random import Random
from typing import TYPE_CHECKING

from tvr.bench.serve_client import ask

if TYPE_CHECKING:
    from tvr.bench.serve_answer import Answer
    from tvr.bench.serve_client import Client, Prompt, Target

#: Words that are one token in about every tokenizer.
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "with", "as", "was", "on"),
    *("be", "at", "by", "this", "have", "from", "or", "had", "not", "are", "but", "what"),
    *("all", "were", "when", "we", "there", "can", "an", "your", "which"),
)


@dataclass
class Load:
    """What came of a load so far.

    Attributes:
        by_number: answers, by the numbers of their prompts.
        seconds: from the first request to the last answer.
    """

    by_number: dict[int, Answer] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def answers(self) -> list[Answer]:
        """In the order of the prompts."""
        return [answer for _, answer in sorted(self.by_number.items())]

    def add(self, number: int, answer: Answer, seconds: float) -> None:
        """Add the answer to prompt `number`, which ended at `seconds`."""
        self.by_number[number] = answer
        self.seconds = seconds


def text_prompts(num_prompts: int, input_len: int, seed: int) -> list[str]:
    """Return prompts of random words, `input_len` each, for servers that take no token ids."""
    rng = Random(seed)
    return [" ".join(rng.choices(_WORDS, k=input_len)) for _ in range(num_prompts)]


def arrival_times(num_requests: int, rate: float, seed: int) -> list[float]:
    """Return when requests come, in seconds: a Poisson process of `rate` requests a second.

    The times are stretched so that the last one comes at `num_requests / rate`, as in vLLM's
    benchmark: chance alone would make the rate another one. An infinite rate: all at once.
    """
    if math.isinf(rate):
        return [0.0] * num_requests
    rng = Random(seed)
    times, now = [], 0.0
    for _ in range(num_requests):
        now += rng.expovariate(1.0)
        times.append(now)
    return [at * num_requests / (rate * now) for at in times]


async def put_load(
    clients: Sequence[Client],
    target: Target,
    prompts: Sequence[Prompt],
    *,
    times: Sequence[float],
    max_concurrency: int | None = None,
    report: Callable[[int], None] = lambda done: None,
    into: Load,
) -> None:
    """Ask for all prompts.

    Args:
        clients: ask, in turn.
        target: where.
        prompts: what.
        times: when each comes, in seconds from the start, in order.
        max_concurrency: most requests under way; the others wait here, and their clock does not
            run. None: no limit.
        report: called with the number of answers so far.
        into: gets the answers as they end. Whoever interrupts has in it what was answered.
    """
    gate = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(number: int, client: Client, prompt: Prompt, at: float) -> None:
        await asyncio.sleep(began + at - time.perf_counter())
        came = time.perf_counter()
        async with gate:
            answer = await ask(client, target, prompt)
        answer.queue_time = answer.start - came
        into.add(number, answer, time.perf_counter() - began)
        report(len(into.by_number))

    began = time.perf_counter()
    await asyncio.gather(*map(one, count(), cycle(clients), prompts, times))
