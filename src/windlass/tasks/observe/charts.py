"""The history's charts: a few queries over what the day has kept, for the page and `windlass top`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from windlass.core.metrics import node, serving, training
from windlass.tasks.observe.promql.parse import parse
from windlass.tasks.observe.promql.tree import Expression, selectors


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    query: str
    by: str = ""
    """The label that tells its series apart."""

    @cached_property
    def expression(self) -> Expression:
        return parse(self.query)


CHARTS = (
    Chart("Generated tokens", "tokens/s", f"sum(rate({serving.GENERATION_TOKENS}[5m]))"),
    Chart("Requests waiting", "requests", f"sum({serving.WAITING})"),
    Chart("Requests running", "requests", f"sum({serving.RUNNING})"),
    Chart("KV cache", "ratio", f"max({serving.KV_USAGE})"),
    Chart(
        "Time to first token",
        "seconds",
        f"sum(rate({serving.TIME_TO_FIRST_TOKEN.sum}[5m])) / sum(rate({serving.TIME_TO_FIRST_TOKEN.count}[5m]))",
    ),
    Chart("GPU power", "watts", f"sum by (gpu) ({node.POWER_USAGE})", "gpu"),
    Chart("GPU temperature", "celsius", f"max by (gpu) ({node.GPU_TEMP})", "gpu"),
    Chart("GPU memory", "ratio", f"max by (gpu) ({node.FB_USED} / ({node.FB_USED} + {node.FB_FREE}))", "gpu"),
    Chart("CPU", "ratio", f'1 - sum(rate({node.CPU_SECONDS}{{mode=~"idle|iowait"}}[5m])) / sum(rate({node.CPU_SECONDS}[5m]))'),
    Chart("Power", "watts", f"sum by (source) (rate({node.NODE_ENERGY}[5m]))", "source"),
    Chart("Energy of requests", "watts", f"sum by (use) (rate({node.SERVED_ENERGY}[5m]))", "use"),
    Chart("Training loss", "loss", f"max({training.LOSS})"),
    Chart("Training speed", "tokens/s", f"sum({training.TOKEN_RATE})"),
)


def kept_in_charts() -> frozenset[str]:
    return frozenset(one.name for chart in CHARTS for one in selectors(chart.expression))
