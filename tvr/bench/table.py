"""Rows as a table: a line for each cell, the backends side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvr.bench.rows import Row

_NOT_SHAPE = frozenset(
    {"backend", "us", "tb_s", "p10_us", "p90_us", "bytes", "mode", "launches", "samples", "sets"}
    | {"tflop_s", "note", "error", "skipped"}
)


def format_table(cells: Sequence[Sequence[Row]], backends: Sequence[str]) -> str:
    """Return a table for each op, and under them what failed, was skipped or not captured.

    Args:
        cells: the rows of each cell, in the order of `backends`.
        backends: the others are compared with the first: the ratio is its time by theirs.
    """
    by_op: dict[str, list[Sequence[Row]]] = {}
    for rows in cells:
        by_op.setdefault(rows[0]["op"], []).append(rows)
    tables = [_of_op(op, found, backends) for op, found in by_op.items()]
    return "\n\n".join([*tables, *_remarks([row for rows in cells for row in rows])])


def _of_op(op: str, cells: list[Sequence[Row]], backends: Sequence[str]) -> str:
    """Return one table: sizes that are the same in all cells go into its heading."""
    shapes = [{k: str(v) for k, v in rows[0].items() if k not in _NOT_SHAPE} for rows in cells]
    names = list(dict.fromkeys(name for shape in shapes for name in shape if name != "op"))
    fixed = [n for n in names if len(cells) > 1 and len({s.get(n) for s in shapes}) == 1]
    free = [name for name in names if name not in fixed]
    first, *others = backends
    speed = "TFLOP/s" if op == "attention_prefill" else "TB/s"
    head = [*free, f"{first} us", speed]
    for name in others:
        head += [f"{name} us", speed, f"{first}/{name}"]
    lines = [head]
    for shape, (mine, *theirs) in zip(shapes, cells, strict=True):
        line = [shape.get(name, "") for name in free] + _figures(mine, op)
        for row in theirs:
            line += [*_figures(row, op), _ratio(mine, row)]
        lines.append(line)
    return "\n".join([", ".join([op, *(f"{n} {shapes[0][n]}" for n in fixed)]), *aligned(lines)])


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a line of text for each of `lines`, its columns right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines]


def _figures(row: Row, op: str) -> list[str]:
    if row["us"] is None:
        return ["failed" if "error" in row else "-", "-"]
    eager = "*" if "note" in row else ""
    speed = row["tflop_s" if op == "attention_prefill" else "tb_s"]
    return [f"{row['us']:.2f}{eager}", f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}"]


def _ratio(mine: Row, other: Row) -> str:
    if mine["us"] is None or other["us"] is None:
        return "-"
    return f"{mine['us'] / other['us']:.2f}"


def _remarks(rows: list[Row]) -> list[str]:
    """Return a line for each thing that went otherwise, those alike as one."""
    said: dict[str, int] = {}
    for row in rows:
        who = f"{row['op']} of {row['backend']}"
        for key, what in (("error", "failed"), ("skipped", "skipped"), ("note", "* is eager")):
            if key in row:
                line = f"{who}: {what}: {row[key]}"
                said[line] = said.get(line, 0) + 1
    lines = [f"{line}{f' ({n} cells)' if n > 1 else ''}" for line, n in said.items()]
    return ["\n".join(lines)] if lines else []
