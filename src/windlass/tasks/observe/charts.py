"""The history's charts: a few conditions over what the day has kept, for the page and `windlass top`."""

from __future__ import annotations

from typing import NamedTuple

from windlass.core.metrics import node, serving, training
from windlass.core.metrics.metric import Metric
from windlass.tasks.observe.conditions.condition import MINUTE, Condition, Grouped, Where, latest, over, series_read

TO_FIRST_TOKEN = serving.TIME_TO_FIRST_TOKEN
IDLE = Where("mode", "=~", "idle|iowait")


class Chart(NamedTuple):
    title: str
    unit: str
    shown: Condition
    by: str = ""
    """The label that tells its series apart."""


def _rate(metric: Metric | str, *where: Where, by: tuple[str, ...] = ()) -> Condition:
    return Grouped("sum", over("rate", metric, 5 * MINUTE, *where), by)


def _most(of: Condition, *by: str) -> Condition:
    return Grouped("max", of, by)


CHARTS = (
    Chart("Generated tokens", "tokens/s", _rate(serving.GENERATION_TOKENS)),
    Chart("Requests waiting", "requests", Grouped("sum", latest(serving.WAITING))),
    Chart("Requests running", "requests", Grouped("sum", latest(serving.RUNNING))),
    Chart("KV cache", "ratio", _most(latest(serving.KV_USAGE))),
    Chart("Time to first token", "seconds", _rate(TO_FIRST_TOKEN.sum) / _rate(TO_FIRST_TOKEN.count)),
    Chart("GPU power", "watts", Grouped("sum", latest(node.POWER_USAGE), ("gpu",)), "gpu"),
    Chart("GPU temperature", "celsius", _most(latest(node.GPU_TEMP), "gpu"), "gpu"),
    Chart("GPU memory", "ratio", _most(latest(node.FB_USED) / (latest(node.FB_USED) + latest(node.FB_FREE)), "gpu"), "gpu"),
    Chart("CPU", "ratio", 1 - _rate(node.CPU_SECONDS, IDLE) / _rate(node.CPU_SECONDS)),
    Chart("Power", "watts", _rate(node.NODE_ENERGY, by=("source",)), "source"),
    Chart("Energy of requests", "watts", _rate(node.SERVED_ENERGY, by=("use",)), "use"),
    Chart("Training loss", "loss", _most(latest(training.LOSS))),
    Chart("Training speed", "tokens/s", Grouped("sum", latest(training.TOKEN_RATE))),
)
KEPT_IN_CHARTS = frozenset(name for chart in CHARTS for name, _ in series_read(chart.shown))
