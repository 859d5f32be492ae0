"""Progress bars with speed and time left, on standard error, only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.runtime.fleet.root.epoch import NodeProgress

Started = Callable[[int], Callable[[int], None]]
"""Total bytes -> a function that advances the bar by so many bytes."""


@contextmanager
def byte_progress(what: str, shown: bool) -> Generator[Started]:
    if not shown or not sys.stderr.isatty():
        yield lambda _: lambda _: None
        return
    with _bars() as bars:
        task = bars.add_task(what, total=None)

        def started(total: int) -> Callable[[int], None]:
            bars.update(task, total=total)
            return lambda done: bars.advance(task, done)

        yield started


class ByteBar:
    """A bar for callers that report (bytes so far, bytes in all)."""

    def __init__(self, started: Started) -> None:
        self._started = started
        self._advance: Callable[[int], None] | None = None
        self._done = 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._advance is None:
            self._advance = self._started(total_bytes)
        self._advance(done_bytes - self._done)
        self._done = done_bytes


@contextmanager
def token_progress(what: str, shown: bool) -> Generator[Callable[[int, int], None]]:
    """For callers that report (tokens so far, tokens in all)."""
    if not shown or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


@contextmanager
def node_progress(shown: bool) -> Generator[Callable[[NodeProgress], None]]:
    """A bar for what each machine of a fleet receives and loads."""
    if not shown or not sys.stderr.isatty():
        yield lambda _: None
        return
    tasks: dict[tuple[str, str], Any] = {}
    with _bars() as bars:

        def show(progress: NodeProgress) -> None:
            key = progress.name, progress.doing
            if key not in tasks:
                tasks[key] = bars.add_task(f"{progress.name} {progress.doing}", total=progress.total_bytes)
            bars.update(tasks[key], completed=progress.done_bytes, total=progress.total_bytes)

        yield show


def _bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    return Progress(TextColumn("{task.description}"), BarColumn(), *size_columns(), console=Console(stderr=True))


def size_columns() -> list[Any]:
    """Bytes, speed and time left; empty until the total is known, where Rich would print `0/? bytes`."""
    from rich.progress import DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.text import Text

    def known(kind: type[Any]) -> Any:
        column: Any = kind()
        render = column.render
        column.render = lambda task: Text("") if task.total is None else render(task)  # type: ignore[no-untyped-call]
        return column

    return [known(kind) for kind in (DownloadColumn, TransferSpeedColumn, TimeRemainingColumn)]
