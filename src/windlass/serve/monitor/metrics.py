"""Numbers for Prometheus, under names that dashboards for other servers have too (docs/serve.md), and the last minute's for the page.

A registry of its own: whoever embeds the server keeps theirs.
"""

from __future__ import annotations

import time
from collections import Counter as Count
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from windlass.core.request import Delta, Stats
from windlass.serve.monitor.rolling import Rate, Recent

FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
NAME = "windlass"


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.first_token = _histogram(registry, "time_to_first_token_seconds", "From a request's arrival.", FIRST_TOKEN_BUCKETS)
        self.inter_token = _histogram(registry, "inter_token_latency_seconds", "Between tokens of an answer.", TOKEN_BUCKETS)
        self.queue = _histogram(registry, "request_queue_time_seconds", "From arrival to the first step.", REQUEST_BUCKETS)
        self.whole = _histogram(registry, "e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_BUCKETS)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts read.", namespace=NAME, registry=registry)
        self.cached_tokens = Counter(
            "prompt_tokens_cached", "Of them, those found in the cache.", namespace=NAME, registry=registry
        )
        self.completion_tokens = Counter("generation_tokens", "Tokens written.", namespace=NAME, registry=registry)
        self.requests = Counter("requests", "Requests by how they ended.", ["outcome"], namespace=NAME, registry=registry)
        self.http = Counter("http_requests", "All requests.", ["route", "status"], namespace=NAME, registry=registry)
        self.recent_first_token, self.recent_inter_token = Recent(), Recent()
        self.token_rate, self.prompt_rate = Rate(), Rate()
        self.outcomes: Count[str] = Count()
        self.total_prompt_tokens = self.total_completion_tokens = 0

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Read when somebody asks."""
        Gauge(name, help, namespace=NAME, registry=self.registry).set_function(read)

    def counter_of(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A count that is kept elsewhere, and begins again where that does, which Prometheus allows for."""
        self.registry.register(_Elsewhere(name, help, read))

    def ended(self, outcome: str) -> None:
        self.requests.labels(outcome).inc()
        self.outcomes[outcome] += 1

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Elsewhere(Collector):
    def __init__(self, name: str, help: str, read: Callable[[], float]) -> None:
        self._name, self._help, self._read = f"{NAME}_{name}", help, read

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._help, value=self._read())


def _histogram(registry: CollectorRegistry, name: str, help: str, buckets: Sequence[float]) -> Histogram:
    return Histogram(name, help, namespace=NAME, registry=registry, buckets=buckets)


class Watch:
    """The times of one sequence's answer."""

    __slots__ = ("_arrived", "_last", "_metrics")

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics, self._arrived, self._last = metrics, arrived, 0.0

    def saw(self, delta: Delta) -> None:
        count = len(delta.token_ids)
        if count:
            self._tokens(count)
        if delta.finish_reason is not None:
            self._finished(delta)

    def _tokens(self, count: int) -> None:
        now, metrics = time.perf_counter(), self._metrics
        if not self._last:
            metrics.first_token.observe(now - self._arrived)
            metrics.recent_first_token.add(now - self._arrived)
        else:
            each = (now - self._last) / count
            metrics.recent_inter_token.add(each)
            metrics.inter_token.observe(each)
        self._last = now
        metrics.completion_tokens.inc(count)
        metrics.total_completion_tokens += count
        metrics.token_rate.add(count)

    def _finished(self, delta: Delta) -> None:
        metrics = self._metrics
        metrics.whole.observe(time.perf_counter() - self._arrived)
        if delta.timings is not None:
            metrics.queue.observe(delta.timings.queue_seconds)
        if delta.usage is not None:
            metrics.prompt_tokens.inc(delta.usage.prompt_tokens)
            metrics.cached_tokens.inc(delta.usage.cached_tokens)
            metrics.prompt_rate.add(delta.usage.prompt_tokens - delta.usage.cached_tokens)
            metrics.total_prompt_tokens += delta.usage.prompt_tokens


def add_engine_gauges(metrics: Metrics, stats: Callable[[], Stats], restarts: Callable[[], int]) -> None:
    """Of what the engine said last, which is at most a second or a step old."""
    metrics.gauge("num_requests_running", "Sequences that the engine runs.", lambda: stats().running)
    metrics.gauge("num_requests_waiting", "Sequences that wait for the engine.", lambda: stats().waiting)
    metrics.gauge("kv_cache_usage_ratio", "Blocks of keys and values held by sequences, of all.", lambda: kv_share(stats()))
    metrics.gauge("kv_cache_blocks", "Blocks that there are.", lambda: stats().num_blocks)
    metrics.counter_of("num_preemptions", "Sequences put back for want of blocks.", lambda: stats().preemptions)
    metrics.counter_of("prefix_cache_queries", "Prompt tokens looked up.", lambda: stats().prefix_query_tokens)
    metrics.counter_of("prefix_cache_hits", "Prompt tokens found.", lambda: stats().prefix_hit_tokens)
    metrics.counter_of("engine_steps", "Steps of the engine.", lambda: stats().steps)
    metrics.counter_of("engine_restarts", "Times the engine was started anew.", restarts)


def kv_share(stats: Stats) -> float:
    return stats.blocks_used / stats.num_blocks if stats.num_blocks else 0.0
