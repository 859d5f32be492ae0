"""What a metric is, in Prometheus' terms (prometheus.io/docs/practices/naming)."""

from __future__ import annotations

from typing import Literal

from windlass.core.model import Frozen

Kind = Literal["counter", "gauge", "histogram"]


class Metric(Frozen):
    name: str
    """As it is exported: a counter ends in `_total`, the unit stands before that."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    alias: str = ""
    """The name that dashboards made for vLLM ask for (vllm/v1/metrics/loggers.py); empty: it has none."""
    alias_labels: tuple[tuple[str, str], ...] = ()
    """Our label -> its label there."""

    def __str__(self) -> str:
        return self.name

    @property
    def family(self) -> str:
        """Without `_total`, as prometheus_client and OpenMetrics name a counter."""
        return self.name.removesuffix("_total") if self.kind == "counter" else self.name

    @property
    def bucket(self) -> str:
        return f"{self.name}_bucket"

    @property
    def count(self) -> str:
        return f"{self.name}_count"

    @property
    def sum(self) -> str:
        return f"{self.name}_sum"

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its samples."""
        return (self.bucket, self.count, self.sum) if self.kind == "histogram" else (self.name,)


def counter(name: str, help: str, *labels: str, alias: str = "", alias_labels: tuple[tuple[str, str], ...] = ()) -> Metric:
    return Metric(name=name, kind="counter", help=help, labels=labels, alias=alias, alias_labels=alias_labels)


def gauge(name: str, help: str, *labels: str, alias: str = "") -> Metric:
    return Metric(name=name, kind="gauge", help=help, labels=labels, alias=alias)


def histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str, alias: str = "") -> Metric:
    return Metric(name=name, kind="histogram", help=help, labels=labels, buckets=buckets, alias=alias)
