"""A trace's phases and ops as a table."""

from __future__ import annotations

from collections.abc import Sequence

from tvr.bench.trace import Range, Trace


def trace_rows(trace: Trace, phases: Sequence[str]) -> list[list[str]]:
    """Return the rows of a table, its head first: calls, and milliseconds of host and device.

    A range's time on the host includes those within it. On a GPU, "(no op)" is what kernels take
    that no op launched.
    """
    on_gpu = bool(trace.device)
    rows = [["phase or op", "calls", "host ms", "us/call", *(["device ms"] if on_gpu else [])]]
    found: dict[str, list[Range]] = {}
    for name in phases:
        found[name] = trace.phases([name])
    for call in sorted(trace.ops):
        found.setdefault(call.name, []).append(call)
    for name, ranges in found.items():
        us = sum(r.us for r in ranges)
        row = [name, str(len(ranges)), f"{us / 1e3:.3f}", f"{us / max(len(ranges), 1):.1f}"]
        if on_gpu:
            row.append("" if name in phases else _device_ms(trace, name))
        rows.append(row)
    if on_gpu:
        rows.append(["(no op)", "", "", "", _device_ms(trace, "")])
    return rows


def _device_ms(trace: Trace, op: str) -> str:
    return f"{sum(r.us for r in trace.device if r.op == op) / 1e3:.3f}"
