"""Every metric by name, and by the part of Windlass that exports it."""

from __future__ import annotations

from types import MappingProxyType

from windlass.core.metrics import node, serving, training
from windlass.core.metrics.metric import Metric
from windlass.errors import UnknownName

PARTS = MappingProxyType(
    {
        "serve": serving.SERVE,
        "engine": serving.ENGINE,
        "models": serving.MODELS,
        "offload": serving.OFFLOAD,
        "fleet": serving.FLEET,
        "train": training.TRAIN,
        "evaluate": training.EVALUATE,
        "route": training.ROUTE,
        "gpu": node.GPU,
        "host": node.HOST,
        "energy": node.ENERGY_METRICS,
        "exporter": node.EXPORTER,
    }
)
METRICS = MappingProxyType({metric.name: metric for part in PARTS.values() for metric in part})
SERIES = MappingProxyType({series: metric for metric in METRICS.values() for series in metric.series})
"""By the name of a sample: a histogram's `_bucket`, `_count` and `_sum` too."""


def metric(name: str) -> Metric:
    if name not in METRICS:
        raise UnknownName("metric", name, tuple(METRICS))
    return METRICS[name]
