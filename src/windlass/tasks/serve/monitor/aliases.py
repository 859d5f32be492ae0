"""The same numbers under the names that dashboards and autoscalers made for vLLM ask for (vllm/v1/metrics/loggers.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from windlass.core.metrics.metric import Metric
from windlass.core.metrics.vocabulary import METRICS

ALIASED = {metric.family: metric for metric in METRICS.values() if metric.alias}
ENGINE = "0"
"""Its label `engine` counts data-parallel engines; we have one."""


class AliasedRegistry(CollectorRegistry):
    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        super().__init__()
        self._registry, self._extra = registry, {"model_name": model, "engine": ENGINE}

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            metric = ALIASED.get(family.name)
            if metric is not None:
                yield aliased(family, metric, self._extra)


def aliased(family: Family, metric: Metric, extra: Mapping[str, str]) -> Family:
    renamed = Family(metric.alias.removesuffix("_total"), family.documentation, family.type)
    for sample in family.samples:
        suffix = sample.name.removeprefix(metric.family)
        labels = {**extra, **_renamed(sample.labels, metric)}
        renamed.samples.append(Sample(f"{renamed.name}{suffix}", labels, sample.value))
    return renamed


def _renamed(labels: Mapping[str, str], metric: Metric) -> dict[str, str]:
    names = dict(metric.alias_labels)
    return {names.get(name, name): value for name, value in labels.items()}
