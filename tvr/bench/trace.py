"""A Chrome trace of some steps, read again: ranges of the host, and what the device did in them."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

#: Key under which a trace has what its steps ran on.
HEADER_KEY = "tvr"

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_OP = re.compile(r"\w+ \[.+\]")
_DECODES = re.compile(r"step: \d+ decodes( in a graph)?")


class Range(NamedTuple):
    """A span of time, in microseconds of the trace's clock.

    Attributes:
        name: of a phase ("step: 8 decodes"), of an op's call ("rope [pycuda]"), or of a kernel.
        start, end: when.
        thread: of the host; of a kernel, its stream.
        op: of a kernel, the op's range that launched it; "": none did.
        step: of a kernel, the range of the step behind whose beginning it was launched; "": none.
    """

    name: str
    start: float
    end: float
    thread: object
    op: str = ""
    step: str = ""

    @property
    def us(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def is_op(self) -> bool:
        """Whether it is the call of an op."""
        return _OP.fullmatch(self.name) is not None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a trace says of steps.

    Attributes:
        header: what they ran on.
        host: phases and calls of ops, by their start.
        device: kernels and copies, by their start; empty on a CPU.
    """

    header: dict[str, Any]
    host: list[Range] = field(default_factory=list)
    device: list[Range] = field(default_factory=list)

    def phases(self, names: Iterable[str]) -> list[Range]:
        """Return the ranges of phases; what stands behind a colon is not part of their name."""
        wanted = set(names)
        return [r for r in self.host if r.name.partition(":")[0] in wanted]

    @property
    def ops(self) -> list[Range]:
        """The calls of ops."""
        return [r for r in self.host if r.is_op]

    @property
    def idle(self) -> float | None:
        """Share of the time from the first to the last kernel in which none ran; None: no GPU."""
        return _idle([self.device] if self.device else [])

    @property
    def decode_idle(self) -> float | None:
        """The same of steps of decodes only; None: no GPU, or there are none.

        Of steps in a row, from the first kernel of the first to the last of the last: what passes
        between two of them counts, and what passes before or behind steps with prompts does not.
        """
        launched = (r for r in self.device if r.step)
        runs = groupby(launched, key=lambda r: _DECODES.fullmatch(r.step) is not None)
        spans = [_span(list(run)) for decodes, run in runs if decodes]
        return _idle([[r for r in self.device if a <= r.start < b] for a, b in spans])


def _span(ranges: Sequence[Range]) -> tuple[float, float]:
    return ranges[0].start, max(r.end for r in ranges)


def _idle(runs: Sequence[Sequence[Range]]) -> float | None:
    """Return the share of idle time within runs of kernels, each by start; None: of no time."""
    busy = whole = 0.0
    for run in filter(None, runs):
        begin = end = run[0].start
        for r in run:
            busy += max(0.0, r.end - max(r.start, end))
            end = max(end, r.end)
        whole += end - begin
    return 1.0 - busy / whole if whole else None


def read_trace(path: Path) -> Trace:
    """Read a trace that `profile_steps` wrote."""
    data = json.loads(path.read_text("utf-8"))
    events = [e for e in data["traceEvents"] if e.get("ph") == "X"]
    host = _ranges(e for e in events if e.get("cat") == "user_annotation")
    launched = {
        e["args"]["correlation"]: (e["tid"], float(e["ts"]))
        for e in events
        if e.get("cat") in _LAUNCHES and "correlation" in e["args"]
    }
    calls = _by_thread(r for r in host if r.is_op)
    steps = _by_thread(r for r in host if r.name.partition(":")[0] == "step")
    device = []
    for e in sorted(events, key=lambda e: float(e["ts"])):
        if e.get("cat") in _DEVICE:
            thread, at = launched.get(e["args"].get("correlation"), (None, 0.0))
            call, step = _begun(calls.get(thread, ()), at), _begun(steps.get(thread, ()), at)
            op = call.name if call is not None and at <= call.end else ""
            # What brings the tokens to the host is launched behind the step's range.
            device.append(_range(e)._replace(op=op, step="" if step is None else step.name))
    return Trace(header=data.get(HEADER_KEY, {}), host=host, device=device)


def _by_thread(ranges: Iterable[Range]) -> dict[object, list[Range]]:
    found: dict[object, list[Range]] = {}
    for r in ranges:
        found.setdefault(r.thread, []).append(r)
    return found


def _begun(ranges: Sequence[Range], at: float) -> Range | None:
    """Return the last of a thread's ranges that had begun by then."""
    i = bisect_right(ranges, at, key=lambda r: r.start)
    return ranges[i - 1] if i else None


def _ranges(events: Iterable[dict[str, Any]]) -> list[Range]:
    return sorted(map(_range, events), key=lambda r: r.start)


def _range(event: dict[str, Any]) -> Range:
    start = float(event["ts"])
    return Range(event["name"], start, start + float(event["dur"]), event["tid"])
