"""What came of a backend on a model, as a row of JSON. docs/benchmarks.md lists the fields."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tvr.bench.rows import Row
    from tvr.bench.workload import Workload

#: Those that vLLM's benchmark of latency gives.
PERCENTILES = (10, 25, 50, 75, 90, 99)


def latency_row(
    fields: dict[str, Any],
    first: Sequence[float],
    whole: Sequence[float],
    facts: dict[str, Any],
    *,
    device_ms: Sequence[float] = (),
) -> Row:
    """Return the row of a batch.

    Args:
        fields: backend, model and sizes.
        first, whole: seconds until each request has a token, and until all have ended; of each
            iteration.
        facts: of the gate, and who else was at work.
        device_ms: milliseconds that a decode step takes the device; empty: not known.
    """
    batch, more = fields["batch"], fields["output_len"] - 1
    gaps = [(b - a) / more * 1e3 for a, b in zip(first, whole, strict=True)]
    itl = _spread("itl_ms", gaps)
    return {
        **fields,
        **_spread("ttft_ms", [seconds * 1e3 for seconds in first]),
        **itl,
        **(_spread("device_ms", device_ms) if device_ms else {}),
        # A drift of the machine may make the shorter run the longer one.
        "tok_s": round(batch / itl["itl_ms"] * 1e3, 2) if itl["itl_ms"] > 0 else None,
        "avg_latency": statistics.fmean(whole),
        "std_latency": statistics.pstdev(whole),
        "percentiles": {str(p): percentile(whole, p) for p in PERCENTILES},
        "latencies": list(whole),
        "first_token_latencies": list(first),
        "samples": len(whole),
        **facts,
    }


def throughput_row(
    fields: dict[str, Any], workload: Workload, seconds: Sequence[float], facts: dict[str, Any]
) -> Row:
    """Return the row of a workload, served in `seconds`, once or more often."""
    took = statistics.median(seconds)
    num_requests, num_new = len(workload.prompts), sum(workload.output_lens)
    total = workload.num_prompt_tokens + num_new
    return {
        **fields,
        "output_tok_s": round(num_new / took, 2),
        **_spread("seconds", seconds),
        "elapsed_time": took,
        "num_requests": num_requests,
        "total_num_tokens": total,
        "requests_per_second": num_requests / took,
        "tokens_per_second": total / took,
        "latencies": list(seconds),
        "samples": len(seconds),
        **facts,
    }


def failed_row(fields: dict[str, Any], measures: Sequence[str], error: str) -> Row:
    """Return the row of a backend without a number."""
    return {**fields, **dict.fromkeys(measures), "error": error}


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile, between two values where it falls between them."""
    return float(np.percentile(values, percent))


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        name: round(statistics.median(values), 5),
        f"p10_{name}": round(percentile(values, 10), 5),
        f"p90_{name}": round(percentile(values, 90), 5),
    }
