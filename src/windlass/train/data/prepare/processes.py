"""Work over several processes: they tell how far they are, stop when told, and end with whoever started them. Knows nothing of the work."""

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
from windlass.machine.parent_death import exit_on_close

SECONDS_BETWEEN_LOOKS = 0.2
Advance = Callable[[int], None]
Item = TypeVar("Item")
Result = TypeVar("Result")


class Stopped(BaseException):
    """Another process failed, or the user has had enough."""


def _nothing() -> None:
    """Named, since other processes find functions by their names."""


def spread(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    jobs: int,
    advance: Advance,
    begin: Callable[..., None] = _nothing,
    arguments: tuple[Any, ...] = (),
) -> Generator[tuple[Item, Result]]:
    """Every item with its result, as they are done. In each process `begin(*arguments)` comes first; `work` says `tell(amount)` as it goes.

    With one job all is done here.
    """
    jobs = min(jobs or len(os.sched_getaffinity(0)), len(items))
    if jobs > 1:
        yield from _apart(work, items, jobs, advance, begin, arguments)
        return
    begin(*arguments)
    _state.advance = advance
    for item in items:
        yield item, work(item)


def tell(amount: int) -> None:
    """That so much more is done. Raises where the work is to end."""
    _state.tell(amount)


class _State:
    """Of a process that works."""

    def __init__(self) -> None:
        self.told: Synchronized[int] | None = None
        self.stop: Synchronized[int] | None = None
        self.advance: Advance = lambda _: None

    def tell(self, amount: int) -> None:
        if self.told is None or self.stop is None:
            self.advance(amount)
            return
        if self.stop.value:
            raise Stopped
        with self.told.get_lock():
            self.told.value += amount


_state = _State()


def _apart(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    advance: Advance,
    begin: Callable[..., None],
    arguments: tuple[Any, ...],
) -> Generator[tuple[Item, Result]]:
    context = get_context("spawn")
    told, stop = context.Value("q", 0), context.Value("b", 0)
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(told, stop, begin, arguments))
    shown = 0
    try:
        flying: dict[Future[Result | _Failure], Item] = {pool.submit(_guarded, work, item): item for item in items}
        while flying:
            landed, _ = wait(flying, SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
            now = told.value
            advance(now - shown)
            shown = now
            for future in landed:
                yield flying.pop(future), _result(future)
    finally:
        stop.value = 1
        pool.shutdown(cancel_futures=True)


class _Failure(NamedTuple):
    """An error on its way here. Errors themselves do not travel: they are made of more than their message."""

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
        raise BadInput(
            "a process that prepared data ended, perhaps for want of memory; give the same command again, with fewer --jobs"
        ) from None
    if not isinstance(result, _Failure):
        return result
    raise BadInput(result.message) if result.short_bytes is None else DoesNotFit(result.message, result.short_bytes)


def _begin(told: Synchronized[int], stop: Synchronized[int], begin: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process is told, and tells the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    parent = parent_process()
    if parent is not None:
        exit_on_close(parent.sentinel, status=1)
    _state.told, _state.stop = told, stop
    begin(*arguments)
