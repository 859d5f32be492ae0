"""Progress of `windlass bench --served` on standard error: a line for each load that is done and, on a terminal, a bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from windlass.units import format_rate, format_seconds

if TYPE_CHECKING:
    from windlass.tasks.bench.served.client.target import TargetInfo
    from windlass.tasks.bench.served.load import Load
    from windlass.tasks.bench.served.summary import LoadResult

REFRESH_SECONDS = 0.5
"""Drawing takes a few milliseconds, in which no token is received."""


@contextmanager
def showing(shown: bool) -> Generator[ProgressLines]:
    if not shown or not sys.stderr.isatty():
        yield ProgressLines(None, shown)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bars:
        yield ProgressLines(bars, shown)


class ProgressLines:
    """measure.served.bench.ServedProgress."""

    def __init__(self, bars: Any, shown: bool) -> None:
        self._bars, self._shown = bars, shown
        self._task = bars.add_task("", total=None) if bars is not None else None
        self._drawn = self._began = 0.0
        self._load: Load | None = None

    def starting(self, name: str) -> None:
        self._draw(description=f"waiting for {name}", total=None, completed=0)

    def ready(self, name: str, info: TargetInfo, seconds: float | None) -> None:
        after = "" if seconds is None else f", ready after {format_seconds(seconds)}"
        self._line(f"{name}: {info.model}{after}; {info.dialect.described}")

    def shortened(self, loads: Sequence[Load], context_tokens: int) -> None:
        lengths = ", ".join(dict.fromkeys(load.shape for load in loads))
        self._line(f"The context is {context_tokens:,} tokens: prompts and answers of {lengths} instead of the usual ones")

    def begin(self, name: str, load: Load) -> None:
        self._load, self._began = load, time.monotonic()
        total = load.requests if load.requests is not None else round(load.seconds or 0)
        self._draw(description=f"{name}: {load.title}, {load.shape}", total=total, completed=0)

    def done(self, requests: int) -> None:
        now = time.monotonic()
        if self._bars is None or now - self._drawn < REFRESH_SECONDS or self._load is None:
            return
        self._draw(completed=requests if self._load.requests is not None else min(now - self._began, self._load.seconds or 0))

    def ended(self, name: str, result: LoadResult) -> None:
        first, between = result.first_token, result.between_tokens
        times = f", first token {format_seconds(first.p50)}" if first else ""
        times += f", between tokens {format_seconds(between.p50)}" if between else ""
        failed = result.requests - result.answered
        self._line(
            f"{name}: {result.load.title}, {result.load.shape}: {format_rate(result.output_tokens_per_second)} tok/s{times}"
            f"{f', {failed} of {result.requests} failed' if failed else ''}"
        )

    def _draw(self, **values: Any) -> None:
        if self._bars is not None:
            self._drawn = time.monotonic()
            self._bars.update(self._task, **values)
            self._bars.refresh()

    def _line(self, text: str) -> None:
        if not self._shown:
            return
        if self._bars is not None:
            self._bars.console.print(text, highlight=False, markup=False)
        else:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()
