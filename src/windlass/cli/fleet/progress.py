"""What every machine of a fleet receives and reads, a line each, on standard error, only where a person is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windlass.fleet.root.epoch import NodeProgress


@contextmanager
def node_progress(shown: bool) -> Generator[Callable[[NodeProgress], None]]:
    if not shown or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    tasks: dict[tuple[str, str], TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def told(progress: NodeProgress) -> None:
            key = progress.name, progress.doing
            if key not in tasks:
                tasks[key] = bars.add_task(f"{progress.name} {progress.doing}", total=progress.total_bytes)
            bars.update(tasks[key], completed=progress.done_bytes, total=progress.total_bytes)

        yield told
