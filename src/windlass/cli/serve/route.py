"""`windlass serve --route`: a router behind the same server, with its counters in /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from windlass.core.launch import Launch
from windlass.open.route import open_router
from windlass.route.operate.client import RouterClient

if TYPE_CHECKING:
    from windlass.core.client import Client

PREFIX = "windlass_route"


def route_opener(path: Path, launch: Launch) -> Callable[[Callable[[int, int], None], Callable[[str], None]], Client]:
    """The router is read at once, so that a bad one is refused before anything is served."""
    lines: list[Callable[[str], None]] = []
    router = open_router(path, launch, lambda line: lines[-1](line) if lines else None)

    def opened(_progress: Callable[[int, int], None], notify: Callable[[str], None]) -> Client:
        lines.append(notify)
        return _Served(router)

    return opened


class _Served:
    """The router, and its metrics."""

    def __init__(self, router: RouterClient) -> None:
        self._router = router
        self.generate, self.score, self.info, self.close = router.generate, router.score, router.info, router.close
        self.model_names = router.model_names

    def add_metrics(self, registry: Any) -> None:
        registry.register(RouterCollector(self._router))


class RouterCollector(Collector):
    def __init__(self, router: RouterClient) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        counters, standing = self._router.counters, self._router.drift.standing()
        requests = CounterMetricFamily(f"{PREFIX}_requests", "Requests by model and how it was chosen.", labels=("model", "how"))
        for (model, how), count in sorted(counters.requests.items()):
            requests.add_metric((model, how), count)
        failures = CounterMetricFamily(f"{PREFIX}_failures", "Attempts that failed, by model.", labels=("model",))
        opened = CounterMetricFamily(f"{PREFIX}_breaker_opened", "Times a model's breaker opened.", labels=("model",))
        for name, arm in sorted(self._router.arms.items()):
            failures.add_metric((name,), counters.failures[name])
            opened.add_metric((name,), arm.breaker.num_opened)
        yield from (requests, failures, opened)
        for name, value in _totals(self._router).items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", f"{name.replace('_', ' ').capitalize()}.", value=value)
        yield GaugeMetricFamily(
            f"{PREFIX}_drift_alarm", "1: prompts have left the calibrated range.", value=float(standing.is_alarm)
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_drift_low_share", "Share of recent prompts below the calibrated range.", value=standing.low_share
        )


def _totals(router: RouterClient) -> dict[str, float]:
    counters = router.counters
    return {
        "fallbacks": counters.fallbacks,
        "passed_on": counters.passed_on,
        "abstained": counters.abstained,
        "lost": counters.lost,
        "resumed": counters.resumed,
        "cost": counters.cost,
        "co2_grams": counters.grams,
    }
