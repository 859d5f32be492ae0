"""What is read at one time: metrics with their samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from windlass.core.metrics.exposition import text_of
from windlass.core.metrics.metric import Metric


class Readings:
    """Samples by metric, in the order in which they come."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Metric, list[tuple[Mapping[str, str], float]]]] = {}

    def add(self, metric: Metric, value: float | None, labels: Mapping[str, str] | None = None) -> None:
        """None: it could not be read, and is left out."""
        if value is not None:
            self._found.setdefault(metric.name, (metric, []))[1].append((labels or {}, value))

    def __iter__(self) -> Iterator[tuple[Metric, list[tuple[Mapping[str, str], float]]]]:
        return iter(self._found.values())

    def text(self) -> str:
        return text_of(self)
