"""Figures of a served load, by vLLM's names and definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tvr.errors import ConfigError

if TYPE_CHECKING:
    from tvr.bench.serve_answer import Answer
    from tvr.bench.serve_load import Load

#: What has means and percentiles.
METRICS = ("ttft", "tpot", "itl", "e2el")

#: What goodput may be limited by: what each request has one of.
LIMITED = ("ttft", "tpot", "e2el")


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Return the limits in ms of "ttft:200", "tpot:20".

    Raises:
        ConfigError: it is no such thing.
    """
    limits: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in LIMITED or not limit >= 0:
            raise ConfigError(
                f"--goodput {pair!r} is no limit; give NAME:MS, as in ttft:200, of "
                f"{', '.join(LIMITED)}"
            )
        limits[name] = limit
    return limits


def metrics_of(
    load: Load, percentiles: Sequence[float], goodput: Mapping[str, float]
) -> dict[str, Any]:
    """Return the figures of a load under vLLM's names; None where nothing was served.

    Args:
        load: what came.
        percentiles: those of TTFT, TPOT, ITL and E2EL that are wanted.
        goodput: limits in ms; a request within all of them is good.
    """
    done = [answer for answer in load.answers if answer.error is None]
    num_input = sum(answer.prompt_tokens for answer in done)
    num_output = sum(answer.output_tokens for answer in done)
    found: dict[str, Any] = {
        "duration": load.seconds,
        "completed": len(done),
        "failed": len(load.answers) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / load.seconds,
        "request_goodput": None,
        "output_throughput": num_output / load.seconds,
        "total_token_throughput": (num_input + num_output) / load.seconds,
        "max_output_tokens_per_s": _peak_tokens(done),
        "max_concurrent_requests": _peak_requests(done),
    }
    if goodput:
        good = sum(_is_good(answer, goodput) for answer in done)
        found["request_goodput"] = good / load.seconds
    seconds = {
        "ttft": [a.ttft for a in done],
        "tpot": [tpot for a in done if (tpot := a.tpot) is not None],
        "itl": [gap for a in done for gap in a.itls],
        "e2el": [a.latency for a in done],
    }
    for name, values in seconds.items():
        found |= _spread(name, values, percentiles)
    return found


def percentile_key(percentile: float, metric: str) -> str:
    """Return the field of a percentile, as `p99_ttft_ms`."""
    return f"p{percentile:g}_{metric}_ms"


def _spread(name: str, seconds: list[float], percentiles: Sequence[float]) -> dict[str, Any]:
    keys = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms"]
    keys += [percentile_key(p, name) for p in percentiles]
    if not seconds:
        return dict.fromkeys(keys)
    ms = np.array(seconds) * 1e3
    figures = [ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, list(percentiles))]
    return dict(zip(keys, map(float, figures), strict=True))


def _is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    # An answer of one token has no TPOT, and so keeps any limit.
    seconds = {"ttft": answer.ttft, "tpot": answer.tpot or 0.0, "e2el": answer.latency}
    return all(seconds[name] * 1e3 <= limit for name, limit in limits.items())


def _peak_tokens(done: Sequence[Answer]) -> float:
    """Return the tokens of the best second, counted from the first request's start."""
    if not done:
        return 0.0
    first = min(answer.start for answer in done)
    arrivals = [(a.start + at - first, count) for a in done for at, count in a.arrivals]
    whole = np.array([int(at) for at, _ in arrivals])
    return float(np.bincount(whole, weights=[count for _, count in arrivals]).max())


def _peak_requests(done: Sequence[Answer]) -> int:
    """Return the most requests under way at one moment, each from its start to its last token."""
    changes = [(a.start, 1) for a in done] + [(a.start + a.latency, -1) for a in done]
    at_once = np.cumsum([change for _, change in sorted(changes)])  # at a tie one ends first
    return int(at_once.max(initial=0))
