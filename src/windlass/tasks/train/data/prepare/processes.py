"""A process pool with progress reports, cancellation, and workers that exit with their parent. Knows nothing of the work."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.sharedctypes import Synchronized
from typing import Any, NamedTuple, TypeVar

from windlass.errors import BadInput, DoesNotFit, Error
from windlass.runtime.machine.parent_death import exit_on_close

POLL_SECONDS = 0.2
Advance = Callable[[int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


class Stopped(BaseException):
    """Another process failed, or the user interrupted."""


def _nothing() -> None:
    """A named function, since other processes unpickle it by name."""


def run_parallel(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    jobs: int,
    advance: Advance,
    begin: Callable[..., None] = _nothing,
    arguments: tuple[Any, ...] = (),
) -> Generator[tuple[Item, Result]]:
    """Yields every item with its result, as completed. Each process first calls `begin(*arguments)`; `work` calls `report_progress(amount)`.

    With one job, everything runs in this process.
    """
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(items))
    if jobs > 1:
        yield from _run_in_pool(work, items, jobs, advance, begin, arguments)
        return
    begin(*arguments)
    _state.advance = advance
    for item in items:
        yield item, work(item)


def report_progress(amount: int) -> None:
    """Adds to the progress. Raises Stopped if the work is cancelled."""
    _state.report_progress(amount)


class _State:
    """State of a worker process."""

    def __init__(self) -> None:
        self.progress: Synchronized[int] | None = None
        self.stop: Synchronized[int] | None = None
        self.advance: Advance = lambda _: None

    def report_progress(self, amount: int) -> None:
        if self.progress is None or self.stop is None:
            self.advance(amount)
            return
        if self.stop.value:
            raise Stopped
        with self.progress.get_lock():
            self.progress.value += amount


_state = _State()


def _run_in_pool(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    advance: Advance,
    begin: Callable[..., None],
    arguments: tuple[Any, ...],
) -> Generator[tuple[Item, Result]]:
    context = get_context("spawn")
    progress, stop = context.Value("q", 0), context.Value("b", 0)
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(progress, stop, begin, arguments))
    shown = 0
    try:
        pending: dict[Future[Result | _Failure], Item] = {pool.submit(_guarded, work, item): item for item in items}
        while pending:
            completed, _ = wait(pending, POLL_SECONDS, FIRST_COMPLETED)
            now = progress.value
            advance(now - shown)
            shown = now
            for future in completed:
                yield pending.pop(future), _result(future)
    finally:
        stop.value = 1
        pool.shutdown(cancel_futures=True)


class _Failure(NamedTuple):
    """A pickled error: our errors take more arguments than their message."""

    message: str
    short_bytes: int | None


def _guarded(work: Callable[[Item], Result], item: Item) -> Result | _Failure:
    try:
        return work(item)
    except Error as error:
        return _Failure(str(error), error.short_bytes if isinstance(error, DoesNotFit) else None)


def _result(future: Future[Result | _Failure]) -> Result:
    try:
        result = future.result()
    except BrokenProcessPool:
        raise BadInput("a worker process died, probably out of memory; run the same command again with fewer --jobs") from None
    if not isinstance(result, _Failure):
        return result
    raise BadInput(result.message) if result.short_bytes is None else DoesNotFit(result.message, result.short_bytes)


def _begin(progress: Synchronized[int], stop: Synchronized[int], begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and cancels the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    parent = parent_process()
    if parent is not None:
        exit_on_close(parent.sentinel, status=1)
    _state.progress, _state.stop = progress, stop
    begin(*arguments)
