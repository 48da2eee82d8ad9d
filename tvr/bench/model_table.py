"""Rows of whole models as a table, and under it what went wrong or was not the backend's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvr.bench.table import aligned

if TYPE_CHECKING:
    from tvr.bench.rows import Row

_SIZES = ("batch", "input_len", "output_len")


def format_latency(batches: Sequence[Sequence[Row]], backends: Sequence[str]) -> str:
    """Return a line for each batch, the backends side by side.

    "idle" is the share of ITL in which the device has nothing to do, where one is known.

    Args:
        batches: the rows of each, in the order of `backends`.
        backends: the others are compared with the first: the ratio is its time by theirs.
    """
    first, *others = backends
    known = any("device_ms" in row for rows in batches for row in rows)
    behind = [*(["idle"] if known else []), "tok/s"]
    head = [*_SIZES, f"{first} TTFT ms", "ITL ms", *behind]
    for name in others:
        head += [f"{name} TTFT ms", f"{first}/{name}", "ITL ms", f"{first}/{name}", *behind]
    drawn = any(mine["sampling"] != "greedy" for mine, *_ in batches)
    if drawn:
        head.append("sampling")
    lines = [head]
    for mine, *theirs in batches:
        line = [str(mine[size]) for size in _SIZES]
        line += [_number(mine, "ttft_ms"), _number(mine, "itl_ms"), *_behind(mine, known)]
        for row in theirs:
            for name in ("ttft_ms", "itl_ms"):
                line += [_number(row, name), _ratio(mine, row, name)]
            line += _behind(row, known)
        lines.append([*line, mine["sampling"]] if drawn else line)
    return _with_remarks(lines, batches)


def format_throughput(steps: Sequence[Sequence[Row]]) -> str:
    """Return a line for each backend; the ratio is its output by that of the first."""
    rows = [row for step in steps for row in step]
    names = ("output_tok_s", "seconds", "requests_per_second", "tokens_per_second")
    lines = [["backend", "output tok/s", "seconds", "requests/s", "tokens/s", "ratio"]]
    for row in rows:
        numbers = [_number(row, name) for name in names]
        lines.append([row["backend"], *numbers, _ratio(row, rows[0], "output_tok_s")])
    return _with_remarks(lines, steps)


def _with_remarks(lines: list[list[str]], steps: Sequence[Sequence[Row]]) -> str:
    first = steps[0][0]
    heading = [first.get("workload"), first["model"], first["dtype"]]
    if first["load_format"] == "dummy":
        heading.append("random weights")
    if first.get("enforce_eager"):
        heading.append("op by op")
    if first.get("batch_invariant"):
        heading.append("batch-invariant")
    table = "\n".join([", ".join(filter(None, heading)), *aligned(lines)])
    remarks = dict.fromkeys(r for rows in steps for row in rows for r in _remarks(row))
    return "\n\n".join(filter(None, [table, "\n".join(remarks)]))


def _remarks(row: Row) -> list[str]:
    if "error" in row:
        where = f" at batch {row['batch']}" if "batch" in row else ""
        return [f"{row['backend']}: failed{where}: {row['error']}"]
    others = row.get("other_backends", {})
    return [f"{row['backend']}: {op} is served by {who}" for op, who in others.items()]


def _number(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        return "failed" if "error" in row else "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _behind(row: Row, known: bool) -> list[str]:
    """Return what comes behind ITL: the idle share, where a row of the table has it, and tok/s."""
    idle = "-"
    if "device_ms" in row and row["itl_ms"] > 0:
        idle = f"{1 - row['device_ms'] / row['itl_ms']:.1%}"
    return [*([idle] if known else []), _number(row, "tok_s")]


def _ratio(row: Row, other: Row, name: str) -> str:
    if not row.get(name) or not other.get(name):
        return "-"
    return f"{row[name] / other[name]:.2f}"
