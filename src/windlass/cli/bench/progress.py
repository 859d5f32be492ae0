"""Progress of a benchmark on standard error, if it is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.tasks.bench.bench import BenchProgress


@contextmanager
def showing(shown: bool) -> Generator[BenchProgress | None]:
    if not shown or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        yield _Shown(bars)


class _Shown:
    def __init__(self, bars: Any) -> None:
        self._bars, self._task = bars, bars.add_task("loading", total=None)

    def loading(self, done_bytes: int, total_bytes: int) -> None:
        self._bars.update(self._task, completed=done_bytes, total=total_bytes)

    def doing(self, what: str) -> None:
        self._bars.update(self._task, description=what)
