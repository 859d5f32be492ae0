"""Evaluates all rules on our own samples. A rule that needs more than the history holds is left to Prometheus, and named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from windlass.errors import BadInput
from windlass.tasks.observe.alerts.state import ActiveAlert, Change, Key, step
from windlass.tasks.observe.history.series import DAY_SECONDS, SeriesStore
from windlass.tasks.observe.promql.evaluate import evaluate
from windlass.tasks.observe.promql.parse import parse
from windlass.tasks.observe.promql.tree import Expression, selectors
from windlass.tasks.observe.rules.rule import Alert, Group, Recording


@dataclass(frozen=True)
class ParsedRule:
    rule: Alert | Recording
    expression: Expression


class Evaluation:
    def __init__(self, groups: Sequence[Group]) -> None:
        rules = [rule for group in groups for rule in (*group.recordings, *group.alerts)]
        self._rules: list[ParsedRule] = []
        self.left_out: list[str] = []
        """Rules that only Prometheus can evaluate."""
        for rule in rules:
            self._add(rule)
        self.active: dict[Key, ActiveAlert] = {}

    def _add(self, rule: Alert | Recording) -> None:
        try:
            expression = parse(rule.expr)
        except BadInput:
            self.left_out.append(rule.name)
            return
        missing = {name for name in self._names(expression) if name in self.left_out}
        longest = max((one.range_seconds + one.offset_seconds for one in selectors(expression)), default=0.0)
        if longest > DAY_SECONDS or missing:
            self.left_out.append(rule.name)
        else:
            self._rules.append(ParsedRule(rule, expression))

    @staticmethod
    def _names(expression: Expression) -> set[str]:
        return {one.name for one in selectors(expression)}

    @property
    def read_names(self) -> frozenset[str]:
        """Metrics that the rules read."""
        made = {parsed.rule.name for parsed in self._rules if isinstance(parsed.rule, Recording)}
        return frozenset(name for parsed in self._rules for name in self._names(parsed.expression)) - made

    @property
    def firing(self) -> list[ActiveAlert]:
        return sorted(
            (alert for alert in self.active.values() if alert.fired_at is not None), key=lambda one: (one.severity, one.since)
        )

    def run(self, store: SeriesStore, now: float) -> list[Change]:
        changes: list[Change] = []
        after: dict[Key, ActiveAlert] = {}
        for parsed in self._rules:
            found = evaluate(parsed.expression, store, now)
            if isinstance(parsed.rule, Recording):
                _record(store, parsed.rule.name, dict(found), now)
            else:
                kept, changed = step(self.active, parsed.rule, found, now)
                after |= kept
                changes += changed
        self.active = after
        return changes


def _record(store: SeriesStore, name: str, found: dict[tuple[tuple[str, str], ...], float], now: float) -> None:
    for labels in store.names(name):
        if labels not in found:
            store.end(name, labels, now)
    for labels, value in found.items():
        store.add(name, labels, now, value)
