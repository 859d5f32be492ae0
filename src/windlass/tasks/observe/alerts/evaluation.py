"""Evaluates all rules on our own samples. A rule that needs more than the history holds is left to Prometheus, and named."""

from __future__ import annotations

from collections.abc import Sequence

from windlass.core.metrics.exposition import Labels
from windlass.tasks.observe.alerts.state import ActiveAlert, Change, Key, step
from windlass.tasks.observe.conditions.condition import series_read
from windlass.tasks.observe.conditions.evaluate import evaluate
from windlass.tasks.observe.history.series import DAY_SECONDS, SeriesStore
from windlass.tasks.observe.rules.rule import Alert, Group, Recording


class Evaluation:
    def __init__(self, groups: Sequence[Group]) -> None:
        self._rules: list[Alert | Recording] = []
        self.left_out: list[str] = []
        """Rules that only Prometheus can evaluate."""
        for rule in [rule for group in groups for rule in (*group.recordings, *group.alerts)]:
            is_whole = all(past <= DAY_SECONDS and name not in self.left_out for name, past in series_read(rule.condition))
            if is_whole:
                self._rules.append(rule)
            else:
                self.left_out.append(rule.name)
        self.active: dict[Key, ActiveAlert] = {}

    @property
    def read_names(self) -> frozenset[str]:
        """Metrics that the rules read."""
        made = {rule.name for rule in self._rules if isinstance(rule, Recording)}
        return frozenset(name for rule in self._rules for name, _ in series_read(rule.condition)) - made

    @property
    def firing(self) -> list[ActiveAlert]:
        return sorted(
            (alert for alert in self.active.values() if alert.fired_at is not None), key=lambda one: (one.severity, one.since)
        )

    def run(self, store: SeriesStore, now: float) -> list[Change]:
        changes: list[Change] = []
        after: dict[Key, ActiveAlert] = {}
        for rule in self._rules:
            found = evaluate(rule.condition, store, now)
            if isinstance(rule, Recording):
                _record(store, rule.name, dict(found), now)
            else:
                kept, changed = step(self.active, rule, found, now)
                after |= kept
                changes += changed
        self.active = after
        return changes


def _record(store: SeriesStore, name: str, found: dict[Labels, float], now: float) -> None:
    for labels in store.names(name):
        if labels not in found:
            store.end(name, labels, now)
    for labels, value in found.items():
        store.add(name, labels, now, value)
