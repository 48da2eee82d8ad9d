"""Timing on a GPU: by events, around replays of a captured graph or around single launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from tvr.conformance.graphs import Graph, capture

Launch = Callable[[], object]


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
        return between_events(self._graph.replay, count, self.launches, self._stream)


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

        return between_events(some, count, self.launches, self._stream)


def between_events(
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
