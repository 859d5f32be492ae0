"""Panels and their place on a dashboard, and the Classic JSON that Grafana 10 to 13 provisions from files.

Schema version 39, the data source by a template variable, panel types that do not need Angular (removed in Grafana 12).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from windlass.core.model import Frozen

SCHEMA_VERSION = 39
COLUMNS = 24
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
Type = Literal["timeseries", "stat", "gauge", "table", "heatmap", "bargauge", "state-timeline"]
INSTANCES = 'instance=~"$instance"'


class Query(Frozen):
    expr: str
    legend: str = ""


class Panel(Frozen):
    title: str
    queries: tuple[Query, ...]
    unit: str = "short"
    type: Type = "timeseries"
    width: int = 8
    help: str = ""
    most: float | None = None
    """Top of the axis."""


class Board(Frozen):
    uid: str
    title: str
    panels: tuple[Panel, ...]
    instances_of: str
    """The metric whose instances can be chosen."""


def board_json(board: Board) -> dict[str, Any]:
    return {
        "uid": board.uid,
        "title": board.title,
        "tags": ["windlass"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "templating": {"list": [_source_variable(), _instance_variable(board)]},
        "annotations": {"list": []},
        "links": [],
        "panels": _placed(board.panels),
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}


def _instance_variable(board: Board) -> dict[str, Any]:
    query = f"label_values({board.instances_of}, instance)"
    return {
        "name": "instance",
        "label": "Instance",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "instances"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """From left to right, then down."""
    found: list[dict[str, Any]] = []
    x = y = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > COLUMNS:
            x, y = 0, y + HEIGHT
        found.append(_panel_json(panel, number, {"x": x, "y": y, "w": panel.width, "h": HEIGHT}))
        x += panel.width
    return found


def _panel_json(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    limits: dict[str, Any] = {"min": 0} | ({} if panel.most is None else {"max": panel.most})
    return {
        "id": number,
        "type": panel.type,
        "title": panel.title,
        "description": panel.help,
        "gridPos": place,
        "datasource": SOURCE,
        "targets": [_target(query, "ABCDEFGH"[index], panel.type) for index, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": {"unit": panel.unit, **limits, "custom": _custom(panel.type)}, "overrides": []},
        "options": _options(panel.type),
    }


def _target(query: Query, letter: str, type: Type) -> dict[str, Any]:
    return {
        "refId": letter,
        "datasource": SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "instant": type in ("stat", "gauge", "table", "bargauge"),
        "range": type not in ("stat", "gauge", "table", "bargauge"),
        "format": "heatmap" if type == "heatmap" else "table" if type == "table" else "time_series",
    }


def _custom(type: Type) -> dict[str, Any]:
    return {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False} if type == "timeseries" else {}


def _options(type: Type) -> dict[str, Any]:
    calculated = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}}
    match type:
        case "timeseries":
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "stat" | "gauge" | "bargauge":
            return calculated
        case "heatmap":
            return {"calculate": False, "yAxis": {"unit": "s"}}
        case _:
            return {}
