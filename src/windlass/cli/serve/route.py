"""`windlass serve --route`: a router behind the same server, with its counters in /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from windlass.cli.serve.options import GivenModel
from windlass.cli.serve.several import own_name
from windlass.core.launch import Launch
from windlass.core.metrics.training import ROUTE_DECISIONS, ROUTE_EXPECTED_SHARE
from windlass.open.resolve import runnable_files
from windlass.open.route import open_router
from windlass.tasks.route.operate.client import RouterClient
from windlass.tasks.route.operate.gate import SwapGate

if TYPE_CHECKING:
    from windlass.core.client import Client

PREFIX = "windlass_route"


def route_opener(
    path: Path, launch: Launch, given: Sequence[GivenModel] = (), keep: int | None = None
) -> Callable[[Callable[[int, int], None], Callable[[str], None]], Client]:
    """The router is read at once, so that a bad one is refused before anything is served."""
    lines: list[Callable[[str], None]] = []
    paths = [runnable_files(one.model, shown=True) for one in given]
    models = {one.name or own_name(path): str(path) for one, path in zip(given, paths, strict=True)}
    router = open_router(path, launch, lambda line: lines[-1](line) if lines else None, given=models, keep=keep)

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
        yield from self._decisions()
        if self._router.gate is not None:
            yield from _swaps(self._router.gate)
        for name, value in _totals(self._router).items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", f"{name.replace('_', ' ').capitalize()}.", value=value)
        yield GaugeMetricFamily(
            f"{PREFIX}_drift_alarm", "1: prompts have left the calibrated range.", value=float(standing.is_alarm)
        )
        yield GaugeMetricFamily(
            f"{PREFIX}_drift_low_share", "Share of recent prompts below the calibrated range.", value=standing.low_share
        )

    def _decisions(self) -> Iterator[Metric]:
        """What the alert about drift compares (tasks/observe/rules)."""
        chosen = CounterMetricFamily(ROUTE_DECISIONS.family, ROUTE_DECISIONS.help, labels=ROUTE_DECISIONS.labels)
        for name in self._router.arms:
            chosen.add_metric((name,), self._router.counters.decisions[name])
        expected = GaugeMetricFamily(ROUTE_EXPECTED_SHARE.name, ROUTE_EXPECTED_SHARE.help, labels=ROUTE_EXPECTED_SHARE.labels)
        for name, share in self._router.expected_share().items():
            expected.add_metric((name,), share)
        yield from (chosen, expected)


def _swaps(gate: SwapGate) -> Iterator[Metric]:
    yield CounterMetricFamily(f"{PREFIX}_swaps", "Times that a model was loaded in place of another.", value=gate.num_swaps)
    yield CounterMetricFamily(f"{PREFIX}_load_seconds", "Time in which models were loaded.", value=gate.load_seconds)
    yield GaugeMetricFamily(
        f"{PREFIX}_longest_wait_seconds", "The longest time that a request waited for its model.", value=gate.longest_wait
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
