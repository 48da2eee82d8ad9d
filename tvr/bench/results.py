"""The JSON that `tvr bench` writes, read again: rows, and what tells one from another."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tvr.errors import ConfigError

if TYPE_CHECKING:
    from tvr.bench.rows import Row


#: Goes up when a key changes its meaning or goes away; new keys may come at any time.
SCHEMA = 1


class Quantity(NamedTuple):
    """Something that rows measure.

    Attributes:
        base: the quantity whose percentiles are its spread; itself, where it has its own.
        less_is_better: a time; else a rate.
    """

    base: str
    less_is_better: bool


QUANTITIES = {
    "us": Quantity("us", True),
    "tb_s": Quantity("us", False),
    "tflop_s": Quantity("us", False),
    "ttft_ms": Quantity("ttft_ms", True),
    "itl_ms": Quantity("itl_ms", True),
    "device_ms": Quantity("device_ms", True),
    "tok_s": Quantity("itl_ms", False),
    "avg_latency": Quantity("avg_latency", True),
    "output_tok_s": Quantity("seconds", False),
    "seconds": Quantity("seconds", True),
    "requests_per_second": Quantity("seconds", False),
    "tokens_per_second": Quantity("seconds", False),
    "request_throughput": Quantity("duration", False),
    "request_goodput": Quantity("duration", False),
    "output_throughput": Quantity("duration", False),
    "total_token_throughput": Quantity("duration", False),
    "duration": Quantity("duration", True),
    **{
        f"{figure}_{metric}_ms": Quantity(f"{figure}_{metric}_ms", True)
        for metric in ("ttft", "tpot", "itl", "e2el")
        for figure in ("mean", "median", "p99")
    },
}

#: What rows say beyond sizes and quantities: how they were measured, or in other words.
_REMARKS = frozenset(
    {"bytes", "mode", "note", "launches", "samples", "sets", "error", "skipped", "gate"}
    | {"other_backends", "std_latency", "percentiles", "latencies", "first_token_latencies"}
    | {"enforce_eager", "batch_invariant"}
    | {"elapsed_time", "num_requests", "total_num_tokens"}
    | {"completed", "failed", "total_input_tokens", "total_output_tokens", "input_lens"}
    | {"max_output_tokens_per_s", "max_concurrent_requests", "output_lens", "ttfts", "itls"}
    | {"start_times", "queue_times", "errors"}
)

#: What a load has as many of as are asked for; the quantities above are of these, too.
_OF_A_LOAD = re.compile(r"(mean|median|std|p[\d.]+)_(ttft|tpot|itl|e2el)_ms")

Identity = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Results:
    """A file of results.

    Attributes:
        path: of the file.
        header: as `tvr.bench.header` made it.
        rows: by what tells them from others, in the order of the file.
    """

    path: Path
    header: dict[str, Any]
    rows: dict[Identity, Row]

    @property
    def backends(self) -> set[str]:
        """The backends that have rows."""
        return {row["backend"] for row in self.rows.values()}

    def without_backend(self) -> dict[Identity, Row]:
        """Return the rows by all that tells them apart but the backend; there must be only one."""
        assert len(self.backends) == 1
        return {
            tuple(pair for pair in identity if pair[0] != "backend"): row
            for identity, row in self.rows.items()
        }


def load_results(path: Path) -> Results:
    """Read a file of results.

    Raises:
        ConfigError: it cannot be read, or holds no results; says why.
    """
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} holds no results of tvr bench: it is no JSON") from error
    try:
        header, rows = data["header"], data["rows"]
        found = [(identity(row), row) for row in rows]
        usable = isinstance(header, dict) and all(map(_is_row, rows))
        by_identity = dict(found)
    except (KeyError, TypeError, AttributeError):
        usable, found, by_identity = False, [], {}
    if not usable or not found:
        raise ConfigError(
            f"{path} holds no results of tvr bench: it must be an object of a header and rows, a "
            "backend in each, as --json writes it"
        )
    written = header.get("schema", SCHEMA)
    if written != SCHEMA:
        raise ConfigError(
            f"{path} has schema {written!r}, and this tvr reads {SCHEMA}: its figures may mean "
            "something else; measure again with one version of tvr"
        )
    if len(by_identity) < len(found):
        raise ConfigError(f"{path} measures the same thing twice; give a file of one run")
    return Results(path=path, header=header, rows=by_identity)


def identity(row: Row) -> Identity:
    """Return the fields that tell a row from others, sorted by name."""
    return tuple(sorted((n, v) for n, v in row.items() if not _is_measured(n)))


def spread(row: Row, name: str) -> tuple[float, float] | None:
    """Return the 10th and 90th percentile of a quantity that has its own; None: not known."""
    if name == "avg_latency":
        percentiles = row.get("percentiles", {})
        ends = percentiles.get("10"), percentiles.get("90")
    else:
        ends = row.get(f"p10_{name}"), row.get(f"p90_{name}")
    low, high = ends
    return None if low is None or high is None else (low, high)


def _is_row(row: Row) -> bool:
    """Return whether a row names its backend, and its figures are numbers, or null."""
    figures = [v for n, v in row.items() if _is_measured(n) and n not in _REMARKS]
    figures += row.get("percentiles", {}).values()
    return isinstance(row["backend"], str) and all(
        figure is None or (type(figure) in (int, float) and math.isfinite(figure))
        for figure in figures
    )


def _is_measured(name: str) -> bool:
    bare = name.removeprefix("p10_").removeprefix("p90_")
    return bare in QUANTITIES or name in _REMARKS or _OF_A_LOAD.fullmatch(name) is not None
