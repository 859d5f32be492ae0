"""Prometheus metrics, named like those of other servers (docs/guides/serve.md), and rolling values of the last minute for the page.

Uses its own registry, so that a program that embeds the server keeps the default one.
"""

from __future__ import annotations

import time
from collections import Counter as Count
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from windlass.core.request import Delta, Stats
from windlass.serve.backend.models import Models
from windlass.serve.monitor.rolling import RollingRate, RollingValues

FIRST_TOKEN_BUCKETS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 240, 480, 960)
NAME = "windlass"


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.first_token = _histogram(
            registry, "time_to_first_token_seconds", "Time to first token, from arrival.", FIRST_TOKEN_BUCKETS
        )
        self.inter_token = _histogram(
            registry, "inter_token_latency_seconds", "Time between output tokens of a sequence.", TOKEN_BUCKETS
        )
        self.queue_time = _histogram(
            registry, "request_queue_time_seconds", "Time in the queue, before the first step.", REQUEST_BUCKETS
        )
        self.request_latency = _histogram(
            registry, "e2e_request_latency_seconds", "Time from arrival to the last token.", REQUEST_BUCKETS
        )
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens processed.", namespace=NAME, registry=registry)
        self.cached_tokens = Counter(
            "prompt_tokens_cached", "Prompt tokens served from the prefix cache.", namespace=NAME, registry=registry
        )
        self.completion_tokens = Counter("generation_tokens", "Generated tokens.", namespace=NAME, registry=registry)
        self.requests = Counter("requests", "Finished requests by outcome.", ["outcome"], namespace=NAME, registry=registry)
        self.http = Counter(
            "http_requests", "HTTP requests by route and status.", ["route", "status"], namespace=NAME, registry=registry
        )
        self.key_tokens = Counter(
            "key_tokens", "Tokens by API key and kind (prompt, completion).", ["key", "kind"], namespace=NAME, registry=registry
        )
        self.key_requests = Counter("key_requests", "Requests by API key.", ["key"], namespace=NAME, registry=registry)
        self.recent_first_token, self.recent_inter_token = RollingValues(), RollingValues()
        self.token_rate, self.prompt_rate = RollingRate(), RollingRate()
        self.outcomes: Count[str] = Count()
        self.total_prompt_tokens = self.total_completion_tokens = 0

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Read on every scrape."""
        Gauge(name, help, namespace=NAME, registry=self.registry).set_function(read)

    def external_counter(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A counter kept elsewhere; it resets when its source does, which Prometheus handles."""
        self.registry.register(_ExternalCounter(name, help, read))

    def add_models(self, models: Models) -> None:
        """Of a server of several models."""
        self.registry.register(_ModelMetrics(models))

    def count_outcome(self, outcome: str) -> None:
        self.requests.labels(outcome).inc()
        self.outcomes[outcome] += 1

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _ExternalCounter(Collector):
    def __init__(self, name: str, help: str, read: Callable[[], float]) -> None:
        self._name, self._help, self._read = f"{NAME}_{name}", help, read

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(self._name, self._help, value=self._read())


class _ModelMetrics(Collector):
    def __init__(self, models: Models) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily(f"{NAME}_model_loaded", "Whether the model is in memory.", labels=["model"])
        waiting = GaugeMetricFamily(
            f"{NAME}_model_requests_waiting", "Requests that wait for the model to load.", labels=["model"]
        )
        loads = CounterMetricFamily(f"{NAME}_model_loads", "How often the model was loaded.", labels=["model"])
        for report in self._models.reports():
            loaded.add_metric([report.name], float(report.state in ("loaded", "leaving")))
            waiting.add_metric([report.name], report.waiting)
            loads.add_metric([report.name], report.loads)
        yield from (loaded, waiting, loads)
        yield CounterMetricFamily(f"{NAME}_model_swaps", "Models unloaded for another.", value=self._models.swaps)


def _histogram(registry: CollectorRegistry, name: str, help: str, buckets: Sequence[float]) -> Histogram:
    return Histogram(name, help, namespace=NAME, registry=registry, buckets=buckets)


class SequenceTimer:
    """Records the latencies of one sequence."""

    __slots__ = ("_arrived", "_last", "_metrics")

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics, self._arrived, self._last = metrics, arrived, 0.0

    def observe(self, delta: Delta) -> None:
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
        metrics.request_latency.observe(time.perf_counter() - self._arrived)
        if delta.timings is not None:
            metrics.queue_time.observe(delta.timings.queue_seconds)
        if delta.usage is not None:
            metrics.prompt_tokens.inc(delta.usage.prompt_tokens)
            metrics.cached_tokens.inc(delta.usage.cached_tokens)
            metrics.prompt_rate.add(delta.usage.prompt_tokens - delta.usage.cached_tokens)
            metrics.total_prompt_tokens += delta.usage.prompt_tokens


def add_engine_metrics(metrics: Metrics, stats: Callable[[], Stats], restarts: Callable[[], int]) -> None:
    """From the engine's last report, which is at most a second or a step old."""
    metrics.gauge("num_requests_running", "Sequences running in the engine.", lambda: stats().running)
    metrics.gauge("num_requests_waiting", "Sequences waiting in the engine's queue.", lambda: stats().waiting)
    metrics.gauge("kv_cache_usage_ratio", "Fraction of KV cache blocks in use.", lambda: kv_cache_usage(stats()))
    metrics.gauge("kv_cache_blocks", "Total KV cache blocks.", lambda: stats().num_blocks)
    metrics.external_counter("num_preemptions", "Sequences preempted for lack of KV cache blocks.", lambda: stats().preemptions)
    metrics.external_counter(
        "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda: stats().prefix_query_tokens
    )
    metrics.external_counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda: stats().prefix_hit_tokens)
    metrics.external_counter("engine_steps", "Engine steps.", lambda: stats().steps)
    metrics.external_counter("engine_restarts", "Engine restarts.", restarts)


def kv_cache_usage(stats: Stats) -> float:
    return stats.blocks_used / stats.num_blocks if stats.num_blocks else 0.0
