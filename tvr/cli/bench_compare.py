"""`tvr bench compare`: two results, as before and after a change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvr.cli import options
from tvr.cli.output import text_writer


def compare(
    before: Annotated[Path, typer.Argument(metavar="A.json", help="Results that --json wrote.")],
    after: Annotated[Path, typer.Argument(metavar="B.json", help="Results to hold against A's.")],
    *,
    debug: options.Debug = False,
) -> int:
    """Print B's share of A for every quantity, and whether it is more than the spread."""
    from tvr.bench.ratios import format_comparison
    from tvr.bench.results import load_results

    text_writer()(format_comparison(load_results(before), load_results(after)))
    return 0
