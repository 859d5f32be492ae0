"""Every metric by name: what serving.py, training.py and node.py state is known here."""

from __future__ import annotations

from types import MappingProxyType

from windlass.core.metrics import node, serving, training
from windlass.core.metrics.metric import Metric

ALL = tuple(value for module in (serving, training, node) for value in vars(module).values() if isinstance(value, Metric))
METRICS = MappingProxyType({metric.name: metric for metric in ALL})
SERIES = MappingProxyType({series: metric for metric in ALL for series in metric.series})
"""By the name of a sample: a histogram's `_bucket`, `_count` and `_sum` too."""
