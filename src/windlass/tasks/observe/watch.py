"""Watches on its own: scrapes, keeps a day, evaluates the rules, tells people. For machines without Prometheus.

Not on an event loop: `tick` takes some milliseconds of a thread and as long as its slowest source.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from windlass.core.metrics.exposition import Labels, read
from windlass.core.metrics.watched import AlertRow, ChartRow, Watched
from windlass.tasks.observe.alerts.evaluation import Evaluation
from windlass.tasks.observe.alerts.notify import Notifier
from windlass.tasks.observe.alerts.state import ActiveAlert, Change
from windlass.tasks.observe.charts import CHARTS, KEPT_IN_CHARTS, Chart
from windlass.tasks.observe.conditions.evaluate import evaluate
from windlass.tasks.observe.history.file import HistoryFile, WriteFile
from windlass.tasks.observe.history.series import SeriesStore
from windlass.tasks.observe.rules.all_rules import all_groups
from windlass.tasks.observe.rules.rule import Group, Objectives, bound_text
from windlass.tasks.observe.scrape import Source, Unreachable

TICK_SECONDS = 15.0
MAX_RECENT = 100
LEAST_CHART_SECONDS = 600.0


class Watch:
    def __init__(
        self,
        sources: Sequence[Source] = (),
        *,
        objectives: Objectives | None = None,
        groups: Sequence[Group] | None = None,
        file: Path | None = None,
        write: WriteFile | None = None,
        notifiers: Sequence[Notifier] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`file` and `write`: where the day is kept, and how a file is replaced; None: in memory only."""
        chosen = objectives or Objectives()
        self._sources, self._notifiers, self._clock = list(sources), list(notifiers), clock
        self.evaluation = Evaluation(all_groups(chosen) if groups is None else groups)
        self._file = None if file is None or write is None else HistoryFile(file, write)
        self.store = SeriesStore() if self._file is None else self._file.load(clock())
        self._kept = self.evaluation.read_names | KEPT_IN_CHARTS
        self._bounds = {bound_text(chosen.first_token_seconds), bound_text(chosen.between_tokens_seconds)}
        self._recent: list[Change] = []
        self._lock = threading.Lock()
        self._seen: dict[str, set[tuple[str, Labels]]] = {}
        """By instance: the series of the last scrape."""

    # --- once every few seconds

    def tick(self) -> list[Change]:
        with self._lock:
            now = self._clock()
            for source in self._sources:
                self._take(source, now)
            changes = self.evaluation.run(self.store, now)
            self.store.thin(now)
            if self._file is not None:
                self._file.append(self.store, now)
            self._recent = [*(one for one in changes if one.kind == "resolved"), *self._recent][:MAX_RECENT]
        for notifier in self._notifiers if changes else ():
            notifier.send(changes)
        return changes

    def _take(self, source: Source, now: float) -> None:
        base = (("instance", source.instance), ("job", source.job))
        try:
            text, is_up = source.read(), 1.0
        except Unreachable:
            text, is_up = "", 0.0
        self.store.add("up", base, now, is_up)
        found: set[tuple[str, Labels]] = set()
        for name, labels, value in read(text):
            if name in self._kept and self._is_kept_bucket(labels):
                key = (name, tuple(sorted((*labels, *base))))
                found.add(key)
                self.store.add(*key, now, value)
        for key in self._seen.get(source.instance, set()) - found:
            self.store.end(*key, now)
        self._seen[source.instance] = found

    def _is_kept_bucket(self, labels: Labels) -> bool:
        """Of a histogram, the buckets that objectives read."""
        return all(value in self._bounds for label, value in labels if label == "le")

    # --- what is known

    def watched(self, seconds: float = 86400.0, points: int = 240) -> Watched:
        with self._lock:
            now = self._clock()
            seconds = min(seconds, self._age(now))
            pending = [_row(alert, "pending") for alert in self.evaluation.active.values() if alert.fired_at is None]
            return Watched(
                now=now,
                alerts=[*(_row(alert, "firing") for alert in self.evaluation.firing), *pending],
                recent=[_row(change.alert, "resolved", change.at) for change in self._recent],
                charts=[row for chart in CHARTS for row in self._chart(chart, now, seconds, points)],
                left_out=self.evaluation.left_out,
                num_series=self.store.num_series,
            )

    def _age(self, now: float) -> float:
        """Of the oldest sample; at least ten minutes, so that a young chart is not one point wide."""
        oldest = min((series.times[0] for _, _, series in self.store.all() if series.times), default=now)
        return max(now - oldest, LEAST_CHART_SECONDS)

    def _chart(self, chart: Chart, now: float, seconds: float, points: int) -> list[ChartRow]:
        step = max(seconds / points, TICK_SECONDS)
        rows: dict[str, list[tuple[float, float]]] = {}
        for index in range(int(seconds / step), -1, -1):
            at = now - index * step
            for labels, value in evaluate(chart.shown, self.store, at):
                if not math.isfinite(value):  # nothing divided by nothing
                    continue
                rows.setdefault(dict(labels).get(chart.by, ""), []).append((round(at, 1), value))
        return [ChartRow(title=chart.title, unit=chart.unit, label=label, points=found) for label, found in sorted(rows.items())]

    def run(self, stop: threading.Event, seconds: float = TICK_SECONDS) -> None:
        while not stop.wait(seconds):
            self.tick()

    def close(self) -> None:
        for notifier in self._notifiers:
            notifier.close()
        if self._file is not None:
            self._file.close()


def _row(alert: ActiveAlert, state: str, since: float | None = None) -> AlertRow:
    return AlertRow(
        name=alert.name,
        severity=alert.severity,
        state=state,
        summary=alert.summary,
        action=alert.action,
        since=alert.since if since is None else since,
        labels=dict(alert.labels),
    )
