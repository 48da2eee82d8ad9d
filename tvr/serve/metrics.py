"""What a server counts, under vLLM's names and with its meanings, for Prometheus."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from tvr.core.llm import LLM
from tvr.core.outputs import RequestOutput
from tvr.serve.deltas import Follower

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of an answer.", _SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", _SECONDS),
    "request_queue_time_seconds": ("From a request's arrival to its first step.", _SECONDS),
    "request_prompt_tokens": ("Tokens of a request's prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of a request's answers.", _TOKENS),
}


class Histogram:
    """Counts values by bucket; a fraction of the cost of the client library's own.

    Args:
        bounds: each bucket's upper end, ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bucket's upper end and the number of values up to it."""
        total, buckets = 0, []
        for bound, count in zip(
            [*map(str, map(float, self.bounds)), "+Inf"], self.counts, strict=True
        ):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class StepMetrics:
    """Where the steps' outputs are counted."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.ended: Counter[str] = Counter()  # answers by finish reason

    def grown(self, follower: Follower, output: RequestOutput, now: float) -> None:
        """Count what a step added to a request.

        Args:
            follower: who waits for it; keeps what has been counted.
            output: the request.
            now: seconds of `time.monotonic()`.
        """
        begins = not any(done.seen for done in follower.answers)
        arrived = follower.job.arrived
        for out, done in zip(output.outputs, follower.answers, strict=True):
            new = len(out.token_ids) - done.seen
            if new:
                if done.seen:
                    self.histograms["inter_token_latency_seconds"].observe(now - done.seen_at)
                elif begins:
                    begins = False
                    self.prompt_tokens += len(output.prompt_token_ids)
                    self.histograms["time_to_first_token_seconds"].observe(now - arrived)
                    if (started := output.metrics.first_scheduled_time) is not None:
                        self.histograms["request_queue_time_seconds"].observe(started - arrived)
                done.seen += new
                done.seen_at = now
                self.generation_tokens += new
        if output.finished:
            self.ended.update(out.finish_reason or "" for out in output.outputs)
            histograms = self.histograms
            histograms["e2e_request_latency_seconds"].observe(now - arrived)
            histograms["request_prompt_tokens"].observe(len(output.prompt_token_ids))
            total = sum(done.seen for done in follower.answers)
            histograms["request_generation_tokens"].observe(total)


class Metrics(Collector):
    """A server's metrics. The engine's thread counts, any thread may render.

    Args:
        llm: the engine.
        model_name: the label of all of them.
    """

    def __init__(self, llm: LLM, model_name: str) -> None:
        self._llm = llm
        self._label = [model_name]
        self._lock = threading.Lock()
        self._steps = StepMetrics()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    @contextmanager
    def of_a_step(self) -> Iterator[StepMetrics]:
        """Yield where to count a step's outputs."""
        with self._lock:
            yield self._steps

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family."""
        stats, label = self._llm.stats(), self._label
        gauges = {
            "num_requests_running": ("Sequences that have a row and blocks.", stats["num_running"]),
            "num_requests_waiting": ("Sequences that wait for them.", stats["num_waiting"]),
            "kv_cache_usage_perc": (
                "KV blocks in use, of all; 1 means 100 percent.",
                stats["num_used_blocks"] / stats["num_blocks"],
            ),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"tvr:{name}", text, labels=["model_name"])
            gauge.add_metric(label, value)
            yield gauge
        info = GaugeMetricFamily(
            "tvr:cache_config_info",
            "The KV pool; always 1.",
            labels=["model_name", "block_size", "num_blocks"],
        )
        info.add_metric([*label, str(self._llm.limits.block_size), str(stats["num_blocks"])], 1)
        yield info
        with self._lock:
            counted = list(self._counted(stats))
        yield from counted

    def _counted(self, stats: Mapping[str, int]) -> Iterator[Metric]:
        steps, label = self._steps, self._label
        counters = {
            "prefix_cache_queries": (
                "Prompt tokens looked up in the prefix cache.",
                stats["num_queried_tokens"],
            ),
            "prefix_cache_hits": ("Prompt tokens found there.", stats["num_cached_tokens"]),
            "num_preemptions": (
                "Sequences that lost their blocks for a while.",
                stats["num_preemptions"],
            ),
            "prompt_tokens": ("Prompt tokens of requests that have begun.", steps.prompt_tokens),
            "generation_tokens": ("Tokens of answers.", steps.generation_tokens),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"tvr:{name}", text, labels=["model_name"])
            counter.add_metric(label, value)
            yield counter
        ended = CounterMetricFamily(
            "tvr:request_success",
            "Answers that have ended.",
            labels=["model_name", "finished_reason"],
        )
        for reason in ("stop", "length", "abort", "error"):
            ended.add_metric([*label, reason], steps.ended[reason])
        yield ended
        for name, (text, _) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"tvr:{name}", text, labels=["model_name"])
            histogram = steps.histograms[name]
            family.add_metric(label, histogram.buckets(), histogram.sum)
            yield family
