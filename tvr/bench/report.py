"""Rows and their header as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvr.conformance.report import write_report

if TYPE_CHECKING:
    from tvr.bench.rows import Row


def write_json(path: Path, header: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write {"header": ..., "rows": [...]}, a row a line.

    Raises:
        ConfigError: the file cannot be written.
    """
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    head = json.dumps(header, indent=1, allow_nan=False)
    write_report(path, f'{{"header": {head},\n"rows": [\n{lines}\n]}}\n')
