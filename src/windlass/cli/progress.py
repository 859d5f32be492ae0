"""A progress bar with speed and time left, on standard error, only where a person is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def byte_progress(what: str, shown: bool) -> Generator[Callable[[int], Callable[[int], None]]]:
    """Gives `started(total bytes)`, which gives `advance(bytes)`."""
    if not shown or not sys.stderr.isatty():
        yield lambda _: lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=None)

        def started(total: int) -> Callable[[int], None]:
            bars.update(task, total=total)
            return lambda done: bars.advance(task, done)

        yield started
