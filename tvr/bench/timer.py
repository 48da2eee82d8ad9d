"""How a launch is timed: in a captured CUDA graph, else by events or, on a CPU, by the clock."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tvr.conformance.graphs import Graph, capture

#: Launches of a sample, at least: the events around them cost as much as a short one.
LAUNCHES = 20

#: Launches so long that 20 take more than this are fewer.
LONG_SAMPLE_US = 20_000.0

Launch = Callable[[], object]


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


class GraphTimer:
    """Replays a graph of all launches; its samples follow one another without a gap."""

    mode, note = "graph", ""

    def __init__(self, launches: Sequence[Launch], repeats: int, stream: torch.cuda.Stream) -> None:
        def run_all() -> None:
            for _ in range(repeats):
                for launch in launches:
                    launch()

        self.launches = repeats * len(launches)
        self._stream = stream
        self._graph: Graph = capture(run_all, stream.device, stream)

    def once(self) -> None:
        with torch.cuda.stream(self._stream):
            self._graph.replay()
        self._stream.synchronize()

    def sample(self, count: int) -> list[float]:
        return _between_events(self._graph.replay, count, self.launches, self._stream)


class EventTimer:
    """Launches one by one between events; where launching is slower than running, it is timed."""

    mode = "eager"

    def __init__(
        self, launches: Sequence[Launch], count: int, stream: torch.cuda.Stream, note: str
    ) -> None:
        self.launches, self.note = count, note
        self._all = launches
        self._next = itertools.cycle(launches)  # samples go on where the last one stopped
        self._stream = stream

    def once(self) -> None:
        with torch.cuda.stream(self._stream):
            for launch in self._all:
                launch()
        self._stream.synchronize()

    def sample(self, count: int) -> list[float]:
        def some() -> None:
            for _ in range(self.launches):
                next(self._next)()

        return _between_events(some, count, self.launches, self._stream)


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
    """Run two launches, the first of which may still load things, and judge by the second."""

    def run(launch: Launch) -> float:
        began = time.perf_counter()
        launch()
        if stream is not None:
            stream.synchronize()
        return (time.perf_counter() - began) * 1e6

    with torch.cuda.stream(stream):  # None changes nothing
        run(launches[0])
        took = run(launches[-1])
    if took * LAUNCHES <= LONG_SAMPLE_US:
        return LAUNCHES
    return max(1, int(LONG_SAMPLE_US / took))


def _between_events(
    run: Callable[[], None], count: int, launches: int, stream: torch.cuda.Stream
) -> list[float]:
    """Return the us per launch of `count` runs, one behind the other.

    The first is behind one that is not timed: while the device is at that, the host gets ahead.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
        events[0].record(stream)
        for event in events[1:]:
            run()
            event.record(stream)
    stream.synchronize()
    pairs = itertools.pairwise(events)
    return [begin.elapsed_time(end) * 1e3 / launches for begin, end in pairs]
