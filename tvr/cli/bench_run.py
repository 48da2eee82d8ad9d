"""What the commands of `tvr bench` share: run cells, show how far, print and write."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvr.cli.exits import EXIT_FAILED, EXIT_INTERRUPTED
from tvr.cli.options import allow_interrupts
from tvr.cli.output import check_can_write, text_writer
from tvr.cli.progress import suite_bar
from tvr.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    from tvr.bench.cells import Cell
    from tvr.bench.rows import Row
    from tvr.contract import DeviceFacts

_PICTURES = (".png", ".svg", ".pdf")


def run_cells(
    cells: Sequence[Cell],
    backends: Sequence[str] | None,
    device: str,
    plugins: str | None,
    *,
    json_file: Path | None,
    plot: Path | None = None,
) -> int:
    """Measure the cells, print a table, write the reports, and return the exit code.

    An interrupt keeps the cells that are done.
    """
    from tvr.bench.plot import plot_bandwidth
    from tvr.bench.session import Session
    from tvr.bench.table import format_table
    from tvr.core.plugin_config import find_config

    check_can_write({"--json": json_file, "--plot": plot})
    facts, config = _facts(device), find_config(plugins, os.environ)
    with redirect_stdout(sys.stderr):  # what a plugin prints belongs to no table
        session = Session(backends, facts, config, command=command_line())

    def draw(header: dict[str, Any], rows: list[Row]) -> None:
        if plot is not None:
            plot_bandwidth(plot, header, rows)

    return run_steps(
        session.compare(cells),
        ["what memory gives at best", *map(str, cells[1:])],
        header=lambda: session.header,
        table=lambda found: format_table(found, session.names),
        json_file=json_file,
        draw=draw,
    )


def run_steps(
    steps: Iterator[list[Row]],
    doing: Sequence[str],
    *,
    header: Callable[[], dict[str, Any]],
    table: Callable[[list[list[Row]]], str],
    json_file: Path | None,
    draw: Callable[[dict[str, Any], list[Row]], None] | None = None,
) -> int:
    """Take the rows of each step, print a table, write the JSON, and return the exit code.

    An interrupt keeps the steps that are done.

    Args:
        steps: measures; each step's rows.
        doing: what each step measures.
        header: returns the header of the JSON.
        table: returns the rows of all steps as text.
        json_file: where the JSON goes, if anywhere.
        draw: called at the end with header and rows, if there are any.
    """
    from tvr.bench.report import write_json
    from tvr.bench.rows import failed

    began = time.monotonic()
    found: list[list[Row]] = []

    def full_header() -> dict[str, Any]:
        seconds, missing = round(time.monotonic() - began, 1), len(found) < len(doing)
        return {**header(), "seconds": seconds, "interrupted": missing}

    def flat() -> list[Row]:
        return [row for rows in found for row in rows]

    allow_interrupts()
    completed = False
    try:
        with (
            redirect_stdout(sys.stderr),
            suppress(KeyboardInterrupt),
            suite_bar(len(doing)) as report,
        ):
            report(0, doing[0])
            for rows in steps:
                found.append(rows)
                if json_file is not None:  # each time: the next step may end the process
                    write_json(json_file, full_header(), flat())
                report(len(found), doing[min(len(found), len(doing) - 1)])
        completed = True
        if draw is not None and found:
            draw(full_header(), flat())
    finally:  # where the disk is full, the work is not lost
        num_left = len(doing) - len(found)
        if completed or found:
            blocks = [_heading(full_header()), *([table(found)] if found else [])]
            if num_left:
                blocks.append(f"interrupted: {num_left} of {len(doing)} cells were not measured")
            text_writer()("\n\n".join(filter(None, blocks)) + "\n")
    if num_left:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if failed(flat()) else 0


def command_line() -> str:
    """Return the command line, for a report's header."""
    return shlex.join(["tvr", *sys.argv[1:]])


def check_can_plot(path: Path, *, has_decodes: bool) -> None:
    """Refuse, before the work, a picture that cannot be drawn."""
    if not has_decodes:
        raise ConfigError("--plot draws decodes, and --op prefill measures none; drop one of them")
    check_picture(path)


def check_picture(path: Path) -> None:
    """Refuse, before the work, a picture of a kind that cannot be made."""
    if path.suffix not in _PICTURES:
        raise ConfigError(f"--plot {path}: the name must end in one of {', '.join(_PICTURES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed; pip install 'tvr[plot]'"
        )


def _facts(device: str) -> DeviceFacts:
    """Return the facts of the device; a CPU is measured only if it is asked for."""
    import torch

    from tvr.core.loader import device_facts

    if device.startswith(("auto", "cuda")) and not torch.cuda.is_available():
        raise BackendUnavailable(
            f"tvr bench measures on a GPU, and torch {torch.__version__} sees no CUDA device; "
            "--device cpu times the CPU, eagerly and by the clock"
        )
    return device_facts(device)


def _heading(header: dict[str, Any]) -> str:
    """Return a line about the device, and one about its memory."""
    lines = [f"{header['device']} ({header['device_name']}), {header['seconds']:.0f} s"]
    if "ceiling" in header:
        best = header["ceiling"]
        line = f"memory: copy {best['copy_tb_s']:.2f} TB/s, read {best['read_tb_s']:.2f} TB/s"
        clock = best.get("sm_clock_mhz")
        lines.append(line if clock is None else f"{line}, SM clock {clock} MHz meanwhile")
    return "\n".join(lines)
