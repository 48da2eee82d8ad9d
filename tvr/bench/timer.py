"""How a launch is timed: in a captured CUDA graph, else by events or, on a CPU, by the clock."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from tvr.bench.gpu_timer import EventTimer, GraphTimer, Launch

#: Launches of a sample, at least: the events around them cost as much as a short one.
LAUNCHES = 20

#: Launches so long that 20 take more than this are fewer.
LONG_SAMPLE_US = 20_000.0


class Timer(Protocol):
    """Times the launches of one backend.

    Attributes:
        mode: "graph" or "eager".
        note: why not "graph".
        launches: those of a sample.
    """

    mode: str
    note: str
    launches: int

    def once(self) -> None:
        """Run every launch at least once, to the end."""
        ...

    def sample(self, count: int) -> list[float]:
        """Return `count` measurements, in us per launch."""
        ...


class WallTimer:
    """Times a CPU by the clock."""

    mode, note = "eager", ""

    def __init__(self, launches: Sequence[Launch], count: int) -> None:
        self.launches = count
        self._all = launches
        self._next = itertools.cycle(launches)

    def once(self) -> None:
        for launch in self._all:
            launch()

    def sample(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            for _ in range(self.launches):
                next(self._next)()
            times.append((time.perf_counter() - began) * 1e6 / self.launches)
        return times


def make_timer(launches: Sequence[Launch], stream: torch.cuda.Stream | None) -> Timer:
    """Return what times `launches`, each of which reads other memory; `stream` None: a CPU.

    What cannot be captured is timed eagerly, and its timer's note says why.
    """
    count = _launches_of_a_sample(launches, stream)
    if stream is None:
        return WallTimer(launches, count)
    try:
        return GraphTimer(launches, math.ceil(count / len(launches)), stream)
    except Exception as error:  # whatever the backend did in the capture
        return EventTimer(launches, count, stream, " ".join(str(error).split()))


def _launches_of_a_sample(launches: Sequence[Launch], stream: torch.cuda.Stream | None) -> int:
    """Judge by the quickest of a few launches behind a first one, which may still load things."""

    def run(launch: Launch) -> float:
        began = time.perf_counter()
        launch()
        if stream is not None:
            stream.synchronize()
        return (time.perf_counter() - began) * 1e6

    with torch.cuda.stream(stream):  # None changes nothing
        run(launches[0])
        took = min(run(launches[-1]) for _ in range(3))
    if took * LAUNCHES <= LONG_SAMPLE_US:
        return LAUNCHES
    return max(1, int(LONG_SAMPLE_US / took))
