"""Some steps as a picture: what host and device did when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tvr.bench.plot import COLOURS, DPI

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tvr.bench.trace import Range, Trace

_OTHER = "#999999"

#: The host waits meanwhile.
_PALE = {"collect": "#dddddd"}
_HEIGHT = 0.8


def plot_timeline(
    path: Path, trace: Trace, host_phases: Sequence[str], step_phases: Sequence[str]
) -> None:
    """Draw the phases of the host, those of the steps, the ops' calls, and the device's work.

    Args:
        path: of the picture.
        trace: what is drawn.
        host_phases, step_phases: each group has a row; where two overlap, the later named is drawn
            above.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lanes: list[tuple[str, list[Range]]] = [
        ("engine", _in_order(trace, host_phases)),
        ("step", _in_order(trace, step_phases)),
        ("ops", trace.ops),
    ]
    if trace.device:
        lanes.append(("device", [r._replace(name=r.op or "no op") for r in trace.device]))
    began = min((r.start for _, ranges in lanes for r in ranges), default=0.0)
    figure = Figure(figsize=(13.0, 1.6 + 0.75 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours = _colours(*(ranges for _, ranges in lanes))
    for row, (_, ranges) in enumerate(lanes):
        _draw(axes, row, ranges, began, colours)
    axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.grid(axis="x", alpha=0.25)
    _legend(axes, lanes, colours)
    figure.suptitle(_title(trace), fontsize=11)
    figure.savefig(path, dpi=DPI)


def _in_order(trace: Trace, names: Sequence[str]) -> list[Range]:
    return [r for name in names for r in trace.phases([name])]


def _draw(
    axes: Axes, row: int, ranges: Iterable[Range], began: float, colours: dict[str, str]
) -> None:
    by_name: dict[str, list[tuple[float, float]]] = {}
    for r in ranges:
        by_name.setdefault(r.name, []).append(((r.start - began) / 1e3, r.us / 1e3))
    for name, spans in by_name.items():
        axes.broken_barh(spans, (row - _HEIGHT / 2, _HEIGHT), facecolors=colours[name])


def _colours(*groups: Iterable[Range]) -> dict[str, str]:
    """Return a colour for each name: the same ones in each group, those that take longest first."""
    found = dict(_PALE)
    for ranges in groups:
        took: dict[str, float] = {}
        for r in ranges:
            took[r.name] = took.get(r.name, 0.0) + r.us
        fresh = [name for name in sorted(took, key=lambda n: -took[n]) if name not in found]
        for i, name in enumerate(fresh):
            found[name] = COLOURS[i] if i < len(COLOURS) and name != "no op" else _OTHER
    return found


def _legend(
    axes: Axes, lanes: Sequence[tuple[str, Sequence[Range]]], colours: dict[str, str]
) -> None:
    """Name the colours, a column for each row of the picture whose names no other has."""
    from matplotlib.patches import Patch

    handles, named = [], set()
    for lane, ranges in lanes:
        for name in dict.fromkeys(r.name for r in ranges):
            if name not in named and colours[name] != _OTHER:
                named.add(name)
                handles.append(Patch(color=colours[name], label=f"{lane}: {name}"))
    axes.legend(
        handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7, frameon=False
    )


def _title(trace: Trace) -> str:
    header = trace.header
    facts = [header.get("model"), header.get("sizes"), header.get("device_name")]
    if trace.idle is not None:
        facts.append(f"device idle {trace.idle:.0%}")
    if trace.decode_idle is not None:
        facts.append(f"of decode steps {trace.decode_idle:.0%}")
    return ", ".join(str(fact) for fact in facts if fact)
