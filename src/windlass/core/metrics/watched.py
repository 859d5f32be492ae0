"""What a watch knows: alerts and the charts of a day. `windlass.tasks.observe` makes it, the server and `windlass top` show it."""

from __future__ import annotations

from windlass.core.model import Frozen


class AlertRow(Frozen):
    """An alert as the page and `windlass top` show it."""

    name: str
    severity: str
    state: str
    """pending, firing or resolved."""
    summary: str
    action: str
    since: float
    labels: dict[str, str] = {}


class ChartRow(Frozen):
    title: str
    unit: str
    label: str
    """Which series of the chart; empty: it has one."""
    points: list[tuple[float, float]]


class Watched(Frozen):
    """Everything that is known, for /windlass/history."""

    now: float
    alerts: list[AlertRow]
    recent: list[AlertRow]
    """Resolved, newest first."""
    charts: list[ChartRow]
    left_out: list[str]
    """Rules that need Prometheus."""
    num_series: int = 0
