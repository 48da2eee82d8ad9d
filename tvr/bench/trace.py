"""A Chrome trace of some steps, read again: ranges of the host, and what the device did in them."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

#: Key under which a trace has what its steps ran on.
HEADER_KEY = "tvr"

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_OP = re.compile(r"\w+ \[.+\]")


class Range(NamedTuple):
    """A span of time, in microseconds of the trace's clock.

    Attributes:
        name: of a phase ("step: 8 decodes"), of an op's call ("rope [pycuda]"), or of a kernel.
        start, end: when.
        thread: of the host; of a kernel, its stream.
        op: of a kernel, the op's range that launched it; "": none did.
    """

    name: str
    start: float
    end: float
    thread: object
    op: str = ""

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
        if not self.device:
            return None
        busy, end = 0.0, self.device[0].start
        for r in self.device:
            busy += max(0.0, r.end - max(r.start, end))
            end = max(end, r.end)
        return 1.0 - busy / (end - self.device[0].start)


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
    calls: dict[object, list[Range]] = {}
    for call in host:
        if call.is_op:
            calls.setdefault(call.thread, []).append(call)
    device = [
        _range(e)._replace(op=_op_at(calls, launched.get(e["args"].get("correlation"))))
        for e in sorted(events, key=lambda e: float(e["ts"]))
        if e.get("cat") in _DEVICE
    ]
    return Trace(header=data.get(HEADER_KEY, {}), host=host, device=device)


def _op_at(calls: dict[object, list[Range]], launch: tuple[object, float] | None) -> str:
    """Return the op in whose call something was launched."""
    if launch is None:
        return ""
    thread, at = launch
    some: Sequence[Range] = calls.get(thread, ())
    i = bisect_right(some, at, key=lambda r: r.start) - 1
    return some[i].name if i >= 0 and at <= some[i].end else ""


def _ranges(events: Iterable[dict[str, Any]]) -> list[Range]:
    return sorted(map(_range, events), key=lambda r: r.start)


def _range(event: dict[str, Any]) -> Range:
    start = float(event["ts"])
    return Range(event["name"], start, start + float(event["dur"]), event["tid"])
