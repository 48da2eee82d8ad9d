"""What came of a backend at a cell, as a row of JSON. docs/benchmarks.md lists the fields."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvr.bench.cells import Cell
    from tvr.bench.peer import Entry

Row = dict[str, Any]


def measured(cell: Cell, backend: str, entry: Entry, num_sets: int) -> Row:
    """Return the row of a right result and its samples."""
    us = statistics.median(entry.samples)
    tenths = statistics.quantiles(entry.samples, n=10, method="inclusive")
    row = {
        "backend": backend,
        **cell.fields,
        "us": round(us, 3),
        "tb_s": round(cell.num_bytes / us / 1e6, 4),
        "p10_us": round(tenths[0], 3),
        "p90_us": round(tenths[-1], 3),
        "bytes": cell.num_bytes,
        "mode": entry.timer.mode,
        "launches": entry.timer.launches,
        "samples": len(entry.samples),
        "sets": num_sets,
    }
    if cell.num_flops:
        row["tflop_s"] = round(cell.num_flops / us / 1e6, 3)
    if entry.timer.note:
        row["note"] = entry.timer.note
    return row


def not_measured(cell: Cell, backend: str, **why: str) -> Row:
    """Return the row of a backend without a number: `why` is an `error`, or `skipped`."""
    row = {"backend": backend, **cell.fields, "us": None, "tb_s": None, "bytes": cell.num_bytes}
    return {**row, **why}


def failed(rows: list[Row]) -> bool:
    """Return whether something failed, or nothing at all was measured."""
    return any("error" in row for row in rows) or all("skipped" in row for row in rows)
