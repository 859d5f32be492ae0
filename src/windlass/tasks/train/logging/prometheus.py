"""Serves metrics to Prometheus on its own port."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from windlass.core.metrics import serving, training
from windlass.errors import BadInput, MissingExtra
from windlass.tasks.train.logging.fan_out import RANKS, StepMetrics
from windlass.tasks.train.progress import RankTimes

GAUGES = {
    "loss": training.LOSS,
    "learning_rate": training.LEARNING_RATE,
    "tokens_per_second": training.TOKEN_RATE,
    "grad_norm": training.GRADIENT_NORM,
    "validation_loss": training.VALIDATION_LOSS,
    "mfu": training.MFU,
    "expert_balance_cv": training.EXPERT_BALANCE,
    "step": training.STEP,
    "steps": training.PLANNED_STEPS,
    "seconds": training.STEP_SECONDS,
    "seconds_left": training.SECONDS_LEFT,
}
"""By field of StepMetrics."""
NOT_FINITE = "not_finite"
"""A rollback because of a NaN or an infinity: its loss may stand for less time than a scrape takes."""
COUNTED = ("rollback", "checkpoint", "checkpoint_failed")


class _RankCounters:
    """Times of the ranks under the names that a split model has, so that the same rule names the straggler."""

    def __init__(self, client: Any, registry: Any) -> None:
        self._steps, self._seconds, self._collectives = (
            client.Counter(made.family, made.help, made.labels, registry=registry)
            for made in (serving.RANK_STEPS, serving.RANK_STEP_SECONDS, serving.RANK_COLLECTIVE_SECONDS)
        )
        self._known: dict[tuple[str, ...], float] = {}

    def show(self, ranks: Sequence[RankTimes]) -> None:
        for one in ranks:
            labels = (str(one.rank), one.host)
            self._grow(self._steps, "steps", labels, one.steps)
            self._grow(self._seconds, "seconds", labels, one.step_seconds)
            for part, seconds in one.collective_seconds.items():
                self._grow(self._collectives, "collective", (*labels, part, ""), seconds)

    def _grow(self, counter: Any, name: str, labels: tuple[str, ...], total: float) -> None:
        """Totals begin anew with every process, as this one's counters do."""
        before = self._known.get((name, *labels), 0.0)
        self._known[name, *labels] = total
        counter.labels(*labels).inc(max(total - before, 0.0))


class Prometheus:
    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        """`port` 0: any free port; `self.port` is the actual one."""
        try:
            import prometheus_client as client
        except ImportError:
            raise MissingExtra("prometheus-client", "train", "serving numbers to Prometheus") from None
        registry = client.CollectorRegistry()
        self._gauges = {field: client.Gauge(made.name, made.help, registry=registry) for field, made in GAUGES.items()}
        self._steps, self._tokens, self._events = (
            client.Counter(made.family, made.help, made.labels, registry=registry)
            for made in (training.STEPS, training.TOKENS, training.EVENTS)
        )
        self._saved, self._interval = (
            client.Gauge(made.name, made.help, registry=registry)
            for made in (training.LAST_CHECKPOINT, training.CHECKPOINT_INTERVAL)
        )
        self._ranks = _RankCounters(client, registry)
        for kind in (*COUNTED, NOT_FINITE):
            self._events.labels(kind=kind)  # at 0 from the start: the first one is an increase
        self._saved_at, self._num_tokens, self._longest = time.time(), 0, 0.0
        self._saved.set(self._saved_at)
        try:
            self._server, self._thread = client.start_http_server(port, addr=host, registry=registry)
        except (OSError, OverflowError) as error:
            raise BadInput(f"--prometheus {port}: cannot open the port: {error}") from None
        self.port: int = self._server.server_port

    def sample(self, sample: StepMetrics) -> None:
        for field, gauge in self._gauges.items():
            value = getattr(sample, field)
            if value is not None:
                gauge.set(value)
        self._steps.inc()
        self._tokens.inc(max(sample.tokens - self._num_tokens, 0))  # a rollback trains on some again
        self._num_tokens = max(self._num_tokens, sample.tokens)

    def event(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind == "validation":
            self._gauges["validation_loss"].set(values["loss"])
        elif kind == RANKS:
            self._ranks.show(values["ranks"])
        elif kind in COUNTED:
            self._events.labels(kind=kind).inc()
            self._loss_or_checkpoint(kind, values)

    def _loss_or_checkpoint(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind == "checkpoint":
            before, self._saved_at = self._saved_at, time.time()
            self._longest = max(self._longest, self._saved_at - before)
            self._saved.set(self._saved_at)
            self._interval.set(self._longest)
        elif "loss" in values:  # the loss that was rolled back is shown too
            self._gauges["loss"].set(values["loss"])
            if not math.isfinite(values["loss"]):
                self._events.labels(kind=NOT_FINITE).inc()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
