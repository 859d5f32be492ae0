"""The progress of an evaluation on standard error: answers a second, accuracy so far with its interval, time and money left."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from windlass.core.statistics.intervals import show_interval, show_percent, wilson
from windlass.tasks.evaluate.run.progress import Silent, Standing, Watcher
from windlass.units import format_rate, format_seconds


@contextmanager
def showing(label: str, shown: bool) -> Generator[Watcher]:
    if not shown or not sys.stderr.isatty():
        yield Notes(label) if shown else Silent()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    described = TextColumn("{task.description}", markup=False)
    columns = (TextColumn(label, markup=False), BarColumn(bar_width=24), MofNCompleteColumn(), described)
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bars:
        yield Bar(bars)


FIRST_ANSWERS = 10


class Notes(Silent):
    """Without a terminal: what an operator must know, what the first answers promise, and every tenth of the way."""

    def __init__(self, label: str) -> None:
        self._label, self._next = label, FIRST_ANSWERS

    def update(self, standing: Standing) -> None:
        if standing.num_new < self._next or standing.num_done >= standing.num_total:
            return
        self._next = standing.num_new + max(standing.num_total // 10, FIRST_ANSWERS)
        self.note(f"{self._label}: {standing.num_done:,} of {standing.num_total:,}, {describe(standing)}")

    def note(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")


class Bar:
    def __init__(self, bars: Any) -> None:
        self._bars, self._task = bars, bars.add_task("", total=None)

    def update(self, standing: Standing) -> None:
        self._bars.update(self._task, completed=standing.num_done, total=standing.num_total, description=describe(standing))

    def note(self, line: str) -> None:
        self._bars.console.print(line, highlight=False, markup=False)


def describe(standing: Standing) -> str:
    parts = [standing.task, f"{format_rate(standing.answers_per_second)} answers/s"]
    if standing.num_graded:
        interval = wilson(standing.num_correct, standing.num_graded)
        share = standing.num_correct / standing.num_graded
        parts.append(f"{show_percent(share, interval)} right ({show_interval(interval)})")
    if standing.num_failed:
        parts.append(f"{standing.num_failed:,} failed")
    if standing.seconds_left is not None:
        parts.append(f"{format_seconds(standing.seconds_left)} left")
    if standing.usd:
        parts.append(f"${standing.usd:.2f} spent, ${standing.usd_left or 0:.2f} left")
    return ", ".join(parts)
