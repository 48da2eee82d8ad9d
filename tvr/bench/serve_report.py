"""A served load as vLLM's table, and as a row of JSON. docs/benchmarks.md lists the fields."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tvr.bench.results import SCHEMA
from tvr.bench.serve_metrics import percentile_key

if TYPE_CHECKING:
    from tvr.bench.rows import Row
    from tvr.bench.serve_load import Load

_WIDTH = 50
_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
_MOST_REASONS = 10


def serve_header(command: str, base_url: str, *, interrupted: bool) -> dict[str, Any]:
    """Return the facts of a run: of this side; what the server is made of, it does not say.

    Args:
        interrupted: not all requests were answered.
    """
    return {
        "schema": SCHEMA,
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "base_url": base_url,
        "versions": {
            "tvr": version("tvr"),
            "python": ".".join(map(str, sys.version_info[:3])),
            "httpx2": version("httpx2"),
        },
        "interrupted": interrupted,
    }


def serve_row(fields: Mapping[str, Any], metrics: Mapping[str, Any], load: Load) -> Row:
    """Return the row of a load: what was asked, vLLM's figures, and lists of each request."""
    answers = load.answers
    fine = [answer.error is None for answer in answers]
    row = {
        **fields,
        **metrics,
        "input_lens": [a.prompt_tokens for a in answers],
        "output_lens": [a.output_tokens if ok else 0 for a, ok in zip(answers, fine, strict=True)],
        "ttfts": [a.ttft if ok else None for a, ok in zip(answers, fine, strict=True)],
        "itls": [a.itls if ok else [] for a, ok in zip(answers, fine, strict=True)],
        "latencies": [a.latency if ok else None for a, ok in zip(answers, fine, strict=True)],
        "start_times": [a.start for a in answers],
        "queue_times": [a.queue_time for a in answers],
        "errors": [a.error or "" for a in answers],
    }
    if not any(fine):
        row["error"] = f"no request was served: {answers[0].error}"
    return row


def format_serve(
    row: Row, metrics: Sequence[str], percentiles: Sequence[float], remarks: Sequence[str] = ()
) -> str:
    """Return the table.

    Args:
        row: as `serve_row` made it.
        metrics: which of TTFT, TPOT, ITL and E2EL it has.
        percentiles: those of each.
        remarks: lines below.
    """
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [_line("Successful requests:", row["completed"])]
    lines += [_line("Failed requests:", row["failed"])]
    if row["max_concurrency"] is not None:
        lines.append(_line("Maximum request concurrency:", row["max_concurrency"]))
    if row["request_rate"] != "inf":
        lines.append(_line("Request rate configured (RPS):", float(row["request_rate"])))
    lines += [
        _line("Benchmark duration (s):", row["duration"]),
        _line("Total input tokens:", row["total_input_tokens"]),
        _line("Total generated tokens:", row["total_output_tokens"]),
        _line("Request throughput (req/s):", row["request_throughput"]),
    ]
    if row["request_goodput"] is not None:
        lines.append(_line("Request goodput (req/s):", row["request_goodput"]))
    lines += [
        _line("Output token throughput (tok/s):", row["output_throughput"]),
        _line("Peak output token throughput (tok/s):", row["max_output_tokens_per_s"]),
        _line("Peak concurrent requests:", row["max_concurrent_requests"]),
        _line("Total token throughput (tok/s):", row["total_token_throughput"]),
    ]
    for name in metrics:
        lines.append(_TITLES[name].center(_WIDTH, "-"))
        short = name.upper()
        lines.append(_line(f"Mean {short} (ms):", row[f"mean_{name}_ms"]))
        lines.append(_line(f"Median {short} (ms):", row[f"median_{name}_ms"]))
        for p in percentiles:
            lines.append(_line(f"P{p:g} {short} (ms):", row[percentile_key(p, name)]))
    lines.append("=" * _WIDTH)
    reasons = Counter(error for error in row["errors"] if error)
    said = [f"{n} failed: {reason}" for reason, n in reasons.most_common(_MOST_REASONS)]
    if len(reasons) > _MOST_REASONS:
        said.append(f"and for {len(reasons) - _MOST_REASONS} other reasons, which --json has")
    return "\n".join([*lines, *said, *remarks]) + "\n"


def _line(label: str, value: float | None) -> str:
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown}"
