"""A run's files to samples: the log of a training run, or the history of a server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.metrics import node, serving
from windlass.errors import BadInput
from windlass.tasks.observe.energy.report import EnergyReport, counter_growth, hours_of, serve_report, train_report
from windlass.tasks.observe.history.file import MAGIC, read_history
from windlass.tasks.observe.history.series import is_end

LOGS = ("log.jsonl", "metrics.jsonl")


def report_of(run: Path, watts: float | None) -> EnergyReport:
    if run.is_file() and run.read_bytes()[: len(MAGIC)] == MAGIC:
        return _from_history(run)
    log = run if run.is_file() else next((run / name for name in LOGS if (run / name).is_file()), None)
    if log is None:
        raise BadInput(f"{run} has no {' or '.join(LOGS)}: give the folder of a training run, or a server's history file")
    return train_report(run.name, _lines(log), watts)


def _lines(log: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in log.read_bytes().splitlines():
        try:
            found.append(msgspec.json.decode(line, type=dict[str, Any]))
        except DECODE_ERRORS:
            continue
    return found


def _from_history(path: Path) -> EnergyReport:
    store = read_history(path, time.time())
    by_use: dict[str, float] = {}
    by_hour: dict[int, float] = {}
    tokens, first, last = 0.0, float("inf"), 0.0
    for name, labels, series in store.all():
        values = [value for value in series.values if not is_end(value)]
        if not values:
            continue
        first, last = min(first, series.times[0]), max(last, series.times[-1])
        grown = counter_growth(values) - values[0]
        if name == node.SERVED_ENERGY.name:
            use = dict(labels)["use"]
            by_use[use] = by_use.get(use, 0.0) + grown
            read = [(at, value - values[0]) for at, value in zip(series.times, series.values, strict=True) if not is_end(value)]
            for hour, joules in hours_of(read).items():
                by_hour[hour] = by_hour.get(hour, 0.0) + joules
        elif name == serving.GENERATION_TOKENS.name:
            tokens += grown
    return serve_report(path.name, by_use, max(last - first, 0.0), int(tokens), by_hour)
