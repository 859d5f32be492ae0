"""Rules as a file for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from windlass.tasks.observe.conditions.promql import promql
from windlass.tasks.observe.render.yaml import to_yaml
from windlass.tasks.observe.rules.rule import Alert, Group, Recording

HEAD = "Made by `windlass observe render`. Changes here are lost: make your own rules in another file."


def rules_file(groups: Sequence[Group]) -> str:
    return to_yaml({"groups": [_group(group) for group in groups]}, HEAD)


def duration(seconds: float) -> str:
    """Prometheus takes whole milliseconds."""
    return f"{seconds:g}s" if seconds == int(seconds) else f"{round(seconds * 1000)}ms"


def _group(group: Group) -> dict[str, Any]:
    rules = [*map(_recording, group.recordings), *map(_alert, group.alerts)]
    return {"name": group.name, "interval": duration(group.interval_seconds), "rules": rules}


def _recording(rule: Recording) -> dict[str, Any]:
    return {"record": rule.name, "expr": promql(rule.condition)}


def _alert(rule: Alert) -> dict[str, Any]:
    held = {"for": duration(rule.for_seconds)} if rule.for_seconds else {}
    return {
        "alert": rule.name,
        "expr": promql(rule.condition),
        **held,
        "labels": {"severity": rule.severity},
        "annotations": {"summary": rule.summary, "action": rule.action},
    }
