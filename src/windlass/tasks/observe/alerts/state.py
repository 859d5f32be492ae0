"""Which alerts are pending and firing, from one evaluation to the next, as Prometheus keeps them (rules/alerting.go). Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from windlass.core.metrics.exposition import Labels
from windlass.core.model import Frozen
from windlass.tasks.observe.conditions.evaluate import Vector
from windlass.tasks.observe.rules.rule import Alert
from windlass.units import format_seconds

Key = tuple[str, Labels]
_TEMPLATE = re.compile(r"\{\{\s*\$(labels\.(?P<label>\w+)|value)\s*(?:\|\s*(?P<how>\w+)\s*)?\}\}")


class ActiveAlert(Frozen):
    name: str
    severity: str
    labels: Labels
    summary: str
    action: str
    value: float
    since: float
    """When its condition became true."""
    fired_at: float | None = None
    """None: it has not lasted long enough yet."""

    @property
    def key(self) -> Key:
        return self.name, self.labels


class Change(Frozen):
    kind: Literal["firing", "resolved"]
    alert: ActiveAlert
    at: float


def step(
    active: Mapping[Key, ActiveAlert], rule: Alert, found: Vector, now: float
) -> tuple[dict[Key, ActiveAlert], list[Change]]:
    """The alerts of one rule after an evaluation, and what changed."""
    after: dict[Key, ActiveAlert] = {}
    changes: list[Change] = []
    for labels, value in found:
        alert = _next(active.get((rule.name, labels)), rule, labels, value, now)
        after[alert.key] = alert
        if alert.fired_at == now:
            changes.append(Change(kind="firing", alert=alert, at=now))
    ended = [alert for key, alert in active.items() if key[0] == rule.name and key not in after and alert.fired_at is not None]
    return after, [*changes, *(Change(kind="resolved", alert=alert, at=now) for alert in ended)]


def _next(before: ActiveAlert | None, rule: Alert, labels: Labels, value: float, now: float) -> ActiveAlert:
    since = now if before is None else before.since
    fired = None if before is None else before.fired_at
    if fired is None and now - since >= rule.for_seconds:
        fired = now
    text = filled(rule.summary, labels, value)
    if before is not None:
        return msgspec.structs.replace(before, value=value, summary=text, fired_at=fired)
    return ActiveAlert(
        name=rule.name,
        severity=rule.severity,
        labels=labels,
        summary=text,
        action=rule.action,
        value=value,
        since=since,
        fired_at=fired,
    )


def filled(template: str, labels: Labels, value: float) -> str:
    """`{{ $labels.gpu }}` and `{{ $value | humanizePercentage }}`, as Prometheus fills them in."""
    known = dict(labels)

    def replace(found: re.Match[str]) -> str:
        return known.get(found["label"], "") if found["label"] else humanized(value, found["how"] or "")

    return _TEMPLATE.sub(replace, template)


def humanized(value: float, how: str) -> str:
    if how == "humanizePercentage":
        return f"{100 * value:.4g}%"
    if how == "humanizeDuration":
        return format_seconds(value)
    return f"{value:.4g}"
