"""Decode attention as a picture: bandwidth against bytes, a line for each backend."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tvr.bench.rows import Row

#: Told apart by the colour-blind, too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DPI = 150


def plot_bandwidth(path: Path, header: dict[str, Any], rows: Sequence[Row]) -> None:
    """Draw the decode cells of `rows`, a panel for each head size, and the measured ceiling.

    A dot is a cell, and a line joins the medians of those with equally many tokens.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = [r for r in rows if r["op"] == "attention_decode" and r["us"] is not None]
    head_dims = sorted({row["head_dim"] for row in found}) or [None]
    figure = Figure(figsize=(1.5 + 5.0 * len(head_dims), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(head_dims), sharey=True, squeeze=False)[0]
    name, ceiling = best_ceiling(header)
    for axes, head_dim in zip(panels, head_dims, strict=True):
        of_panel = [row for row in found if row["head_dim"] == head_dim]
        _draw_panel(axes, of_panel)
        axes.axhline(ceiling, color="black", linewidth=1, linestyle="--")
        label = f"ceiling: a {name} by torch, {ceiling:.3g} TB/s"
        place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        axes.annotate(label, (0.02, ceiling), xytext=(0, 3), fontsize=8, **place)
        if of_panel:
            first = of_panel[0]
            heads = f"{first['num_heads']}/{first['num_kv_heads']} heads"
            axes.set_title(f"head_dim {head_dim}, {heads}, {first['dtype']}", fontsize=10)
        axes.set_xlabel("bytes moved by a launch")
    panels[0].set_ylabel("TB/s")
    panels[0].set_ylim(bottom=0)
    figure.suptitle(f"Paged decode attention, {header['device_name']}", fontsize=11)
    figure.savefig(path, dpi=DPI)


def _draw_panel(axes: Axes, rows: list[Row]) -> None:
    """Draw the backends' dots and lines; each line is named at its right end."""
    from matplotlib.ticker import EngFormatter, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.08, y=0.12)
    axes.grid(alpha=0.25)
    ends: list[tuple[float, float, str, str]] = []
    for number, backend in enumerate(dict.fromkeys(row["backend"] for row in rows)):
        colour = COLOURS[number % len(COLOURS)]
        mine = [row for row in rows if row["backend"] == backend]
        alike: dict[int, list[Row]] = {}
        for row in sorted(mine, key=lambda row: row["bytes"]):
            alike.setdefault(row["batch"] * row["ctx"], []).append(row)
        xs = [statistics.median(row["bytes"] for row in some) for some in alike.values()]
        ys = [statistics.median(row["tb_s"] for row in some) for some in alike.values()]
        axes.plot([r["bytes"] for r in mine], [r["tb_s"] for r in mine], "o", color=colour, ms=4)
        axes.plot(xs, ys, color=colour, linewidth=1.5)
        ends.append((ys[-1], xs[-1], backend, colour))
    if rows:
        axes.set_xlim(right=axes.get_xlim()[1] * 4)  # room for the names
    # From the lowest up, each name stands above the one before: lines may end in one point.
    for place, (y, x, backend, colour) in enumerate(sorted(ends)):
        shift = 10 * place - 5 * len(ends)
        axes.annotate(
            backend,
            (x, y),
            xytext=(6, shift),
            textcoords="offset points",
            color=colour,
            fontsize=9,
            annotation_clip=False,
        )


def best_ceiling(header: dict[str, Any]) -> tuple[str, float]:
    """Return the better one of copy and read, and its name."""
    figures = {name: float(header["ceiling"][f"{name}_tb_s"]) for name in ("copy", "read")}
    best = max(figures, key=lambda name: figures[name])
    return best, figures[best]
