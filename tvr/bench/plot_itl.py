"""The time between tokens as a picture: against batch and context, beside the memory's limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvr.bench.plot import COLOURS, DPI, best_ceiling

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tvr.bench.rows import Row

#: Labelled places of each decade on an axis that spans one or so, and on one that spans more.
_SHORT_TICKS, _LONG_TICKS = (1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 5)
_MARKERS = "osD^vP*X"


def limit_ms(header: dict[str, Any], batch: int, ctx: float) -> float:
    """Return the milliseconds in which memory gives a step what it must read.

    Args:
        header: with what `memory_limit` found.
        batch: sequences.
        ctx: tokens in the cache of each, on average.
    """
    size = header["step_bytes"]
    num_bytes = size["weights"] + size["kv_per_token"] * batch * ctx
    return float(num_bytes / best_ceiling(header)[1] / 1e9)


def mean_ctx(row: Row) -> float:
    """Return the mean tokens in the cache of a sequence, over the tokens that ITL is of."""
    return float(row["input_len"] + row["output_len"] / 2)


def plot_itl(path: Path, header: dict[str, Any], rows: Sequence[Row]) -> None:
    """Draw the rows of `tvr bench latency`, a line for each backend and size.

    A panel has the batch as its axis, one more the context; one that would have a single place on
    its axis is left out.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Where the machine drifts, the difference that ITL is may fall below 0.
    found = [row for row in rows if row["itl_ms"] is not None and row["itl_ms"] > 0]
    axis_of = {"batch": "input_len", "input_len": "batch"}
    shown = [axis for axis in axis_of if len({row[axis] for row in found}) > 1] or ["batch"]
    figure = Figure(figsize=(1.5 + 5.5 * len(shown), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, axis in zip(panels, shown, strict=True):
        _draw_panel(axes, header, found, axis, axis_of[axis])
    panels[0].set_ylabel("ms between tokens")
    name, tb_s = best_ceiling(header)
    facts = [rows[0]["model"], rows[0]["dtype"], header["device_name"]]
    figure.suptitle(
        f"{', '.join(facts)}; dashed: weights and KV at {tb_s:.3g} TB/s (a {name} by torch)",
        fontsize=10,
    )
    figure.savefig(path, dpi=DPI)


def _draw_panel(
    axes: Axes, header: dict[str, Any], rows: Sequence[Row], axis: str, group: str
) -> None:
    """Draw lines along `axis`, for each backend (a colour) and value of `group` (a marker)."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter

    what = {"batch": "batch", "input_len": "prompt"}[group]
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    values = sorted({row[group] for row in rows})
    handles = []
    for i, value in enumerate(values):
        marker = _MARKERS[i % len(_MARKERS)]
        alike = sorted((r for r in rows if r[group] == value), key=lambda r: float(r[axis]))
        at = sorted({(_x(r, axis), r["batch"], mean_ctx(r)) for r in alike})
        limits = [limit_ms(header, batch, ctx) for _, batch, ctx in at]
        axes.plot(
            [x for x, _, _ in at], limits, "--", color="black", linewidth=1, marker=marker, ms=3
        )
        for backend, colour in zip(backends, _cycle(len(backends)), strict=True):
            mine = [r for r in alike if r["backend"] == backend]
            ys = [r["itl_ms"] for r in mine]
            ends = [[y - r["p10_itl_ms"] for y, r in zip(ys, mine, strict=True)]]
            ends += [[r["p90_itl_ms"] - y for y, r in zip(ys, mine, strict=True)]]
            axes.errorbar(
                [_x(r, axis) for r in mine], ys, ends, color=colour, marker=marker, ms=5, lw=1.5
            )
        label = f"{what} {value}"
        handles.append(Line2D([], [], color="grey", linestyle="", marker=marker, label=label))
    for backend, colour in zip(backends, _cycle(len(backends)), strict=True):
        handles.append(Line2D([], [], color=colour, label=backend))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=_SHORT_TICKS if high < 20 * low else _LONG_TICKS))
    for one in (axes.xaxis, axes.yaxis):
        one.set_major_formatter(FormatStrFormatter("%g"))
        one.set_minor_formatter(NullFormatter())
    axes.set_xlabel({"batch": "batch", "input_len": "mean context, tokens"}[axis])
    axes.grid(alpha=0.25, which="both")
    # Below: lines are everywhere in a panel.
    axes.legend(
        handles=handles,
        fontsize=8,
        ncols=-(-len(handles) // 2),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.12),
        frameon=False,
    )


def _x(row: Row, axis: str) -> float:
    return mean_ctx(row) if axis == "input_len" else float(row["batch"])


def _cycle(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
