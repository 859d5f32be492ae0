"""The server's Prometheus metrics, as `core/metrics/serving.py` names them, and rolling values of the last minute for the page.

Uses its own registry, so that a program that embeds the server keeps the default one.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from windlass.core.metrics import serving
from windlass.core.metrics.metric import Metric
from windlass.core.request import Delta, Stats
from windlass.core.tiers.stats import TierStats
from windlass.tasks.serve.backend.models import Models
from windlass.tasks.serve.monitor.aliases import AliasedRegistry
from windlass.tasks.serve.monitor.rolling import RollingRate, RollingValues

Readings = Iterable[tuple[Mapping[str, str], float]]
"""(labels, value) of every series."""
NO_TIERS = TierStats()


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.first_token = _histogram(registry, serving.TIME_TO_FIRST_TOKEN)
        self.inter_token = _TokenHistogram(serving.INTER_TOKEN_LATENCY)
        registry.register(self.inter_token)
        self.queue_time = _histogram(registry, serving.QUEUE_TIME)
        self.request_latency = _histogram(registry, serving.REQUEST_LATENCY)
        self.prompt_tokens = _counter(registry, serving.PROMPT_TOKENS)
        self.cached_tokens = _counter(registry, serving.CACHED_TOKENS)
        self.read(serving.GENERATION_TOKENS, lambda: self.total_completion_tokens)
        self.requests = _counter(registry, serving.REQUESTS)
        self.http = _counter(registry, serving.HTTP_REQUESTS)
        self.key_tokens = _counter(registry, serving.KEY_TOKENS)
        self.key_requests = _counter(registry, serving.KEY_REQUESTS)
        self.recent_first_token, self.recent_inter_token = RollingValues(), RollingValues()
        self.token_rate, self.prompt_rate = RollingRate(), RollingRate()
        self.outcomes: Count[str] = Count()
        self.total_prompt_tokens = self.total_completion_tokens = 0

    def read(self, metric: Metric, read: Callable[[], float]) -> None:
        """Kept elsewhere and read on every scrape. A counter resets when its source does, which Prometheus handles."""
        self.read_all(metric, lambda: (({}, read()),))

    def read_all(self, metric: Metric, read: Callable[[], Readings]) -> None:
        """The same, with labels."""
        self.registry.register(_ReadOnScrape(metric, read))

    def add_models(self, models: Models) -> None:
        """Of a server of several models."""
        reports = models.reports
        self.read_all(
            serving.MODEL_LOADED, lambda: [({"model": r.name}, float(r.state in ("loaded", "leaving"))) for r in reports()]
        )
        self.read_all(serving.MODEL_WAITING, lambda: [({"model": r.name}, r.waiting) for r in reports()])
        self.read_all(serving.MODEL_LOADS, lambda: [({"model": r.name}, r.loads) for r in reports()])
        self.read(serving.MODEL_SWAPS, lambda: models.swaps)

    def count_outcome(self, outcome: str) -> None:
        self.requests.labels(outcome).inc()
        self.outcomes[outcome] += 1

    def text(self, alias_model: str | None = None) -> bytes:
        """`alias_model`: the names that vLLM's dashboards ask for are there too, of a model of this name."""
        text = generate_latest(self.registry)
        return text if alias_model is None else text + generate_latest(AliasedRegistry(self.registry, alias_model))


class _TokenHistogram(Collector):
    """A histogram for what happens with every token: a third of the time of prometheus_client's, which locks. One thread observes."""

    def __init__(self, metric: Metric) -> None:
        self._metric, self._bounds = metric, tuple(metric.buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Family]:
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._metric.name, self._metric.help, buckets=buckets, sum_value=self._sum)


class _ReadOnScrape(Collector):
    def __init__(self, metric: Metric, read: Callable[[], Readings]) -> None:
        self._metric, self._read = metric, read

    def collect(self) -> Iterator[Family]:
        metric = self._metric
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.family, metric.help, labels=metric.labels)
        for labels, value in self._read():
            family.add_metric([labels[name] for name in metric.labels], value)
        yield family


def _histogram(registry: CollectorRegistry, metric: Metric) -> Histogram:
    return Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)


def _counter(registry: CollectorRegistry, metric: Metric) -> Counter:
    return Counter(metric.family, metric.help, metric.labels, registry=registry)


class SequenceTimer:
    """Records the latencies of one sequence."""

    __slots__ = ("_arrived", "_last", "_metrics")

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics, self._arrived, self._last = metrics, arrived, 0.0

    def tokens(self, count: int) -> float:
        """Tokens that have arrived together. Returns when."""
        now, metrics = time.perf_counter(), self._metrics
        if not self._last:
            metrics.first_token.observe(now - self._arrived)
            metrics.recent_first_token.add(now - self._arrived)
        else:
            each = (now - self._last) / count
            metrics.recent_inter_token.add(each)
            metrics.inter_token.observe(each)
        self._last = now
        metrics.total_completion_tokens += count
        metrics.token_rate.add(count)
        return now

    def finished(self, delta: Delta) -> None:
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
    metrics.read(serving.RUNNING, lambda: stats().running)
    metrics.read(serving.WAITING, lambda: stats().waiting)
    metrics.read(serving.KV_USAGE, lambda: kv_cache_usage(stats()))
    metrics.read(serving.KV_BLOCKS, lambda: stats().num_blocks)
    metrics.read(serving.KV_CACHED, lambda: stats().blocks_cached)
    metrics.read(serving.PREEMPTIONS, lambda: stats().preemptions)
    metrics.read(serving.PREFIX_QUERIES, lambda: stats().prefix_query_tokens)
    metrics.read(serving.PREFIX_HITS, lambda: stats().prefix_hit_tokens)
    metrics.read(serving.DRAFTED, lambda: stats().drafted)
    metrics.read(serving.ACCEPTED, lambda: stats().accepted)
    metrics.read(serving.ENGINE_STEPS, lambda: stats().steps)
    metrics.read(serving.ENGINE_RESTARTS, restarts)
    metrics.read_all(serving.OFFLOAD_BYTES, lambda: _tier_bytes(stats().tiers))
    metrics.read(serving.OFFLOAD_READ_BYTES, lambda: (stats().tiers or NO_TIERS).read_bytes)
    metrics.read(serving.OFFLOAD_READ_SECONDS, lambda: (stats().tiers or NO_TIERS).read_seconds)
    metrics.read(serving.OFFLOAD_EXPERT_HITS, lambda: (stats().tiers or NO_TIERS).expert_hits)
    metrics.read(serving.OFFLOAD_EXPERT_MISSES, lambda: (stats().tiers or NO_TIERS).expert_misses)
    metrics.read(serving.OFFLOAD_EXPERT_READS, lambda: (stats().tiers or NO_TIERS).expert_reads)
    metrics.read(serving.OFFLOAD_EXPERT_FORESEEN, lambda: (stats().tiers or NO_TIERS).expert_foreseen)
    metrics.read_all(serving.OFFLOAD_GUESSES, lambda: _guesses(stats().tiers or NO_TIERS))
    metrics.read(serving.OFFLOAD_WASTED_BYTES, lambda: (stats().tiers or NO_TIERS).wasted_bytes)


def _tier_bytes(tiers: TierStats | None) -> Readings:
    found = tiers or NO_TIERS
    return [({"tier": "device"}, found.device_bytes), ({"tier": "host"}, found.host_bytes), ({"tier": "disk"}, found.disk_bytes)]


def _guesses(tiers: TierStats) -> Readings:
    wrong = tiers.expert_guesses - tiers.expert_guessed_right
    return [({"outcome": "right"}, tiers.expert_guessed_right), ({"outcome": "wrong"}, wrong)]


def kv_cache_usage(stats: Stats) -> float:
    return stats.blocks_used / stats.num_blocks if stats.num_blocks else 0.0
