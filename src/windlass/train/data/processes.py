"""Units of work over several processes: they tell how far they are, stop when told, and end with whoever started them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from windlass.errors import BadInput
from windlass.train.data.encoding import Encoder
from windlass.train.data.inputs import Unit
from windlass.train.data.unit import Done, Settings, UnitWork

SECONDS_BETWEEN_LOOKS = 0.2
Advance = Callable[[int], None]


class Stopped(BaseException):
    """Another process failed, or the user has had enough."""


class Here:
    """In this process: for one job, or little to do."""

    def __init__(self, work: UnitWork) -> None:
        self._work = work

    def run(self, units: Sequence[Unit], advance: Advance) -> Iterator[tuple[Unit, Done]]:
        for unit in units:
            yield unit, self._work.run(unit, advance)


class Apart:
    def __init__(self, settings: Settings, out: Path | None, signed: Path, jobs: int) -> None:
        self._context = get_context("spawn")
        self._told: Synchronized[int] = self._context.Value("q", 0)
        self._stop: Synchronized[int] = self._context.Value("b", 0)
        self._begin = (settings, out, signed, self._told, self._stop)
        self._jobs = jobs

    def run(self, units: Sequence[Unit], advance: Advance) -> Iterator[tuple[Unit, Done]]:
        pool = ProcessPoolExecutor(self._jobs, mp_context=self._context, initializer=_begin, initargs=self._begin)
        shown = 0
        try:
            flying: dict[Future[Done], Unit] = {pool.submit(_run, unit): unit for unit in units}
            while flying:
                landed, _ = wait(flying, SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
                told = self._told.value
                advance(told - shown)
                shown = told
                for future in landed:
                    yield flying.pop(future), _result(future)
        finally:
            self._stop.value = 1
            pool.shutdown(cancel_futures=True)


def _result(future: Future[Done]) -> Done:
    try:
        return future.result()
    except BrokenProcessPool:
        raise BadInput(
            "a process that prepared data was killed, perhaps for want of memory; give the same command again, with fewer --jobs"
        ) from None


_state: dict[str, Any] = {}


def _begin(settings: Settings, out: Path | None, signed: Path, told: Synchronized[int], stop: Synchronized[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process is told, and tells the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # processes are the parallelism
    threading.Thread(target=_end_with_parent, daemon=True).start()
    encoder = Encoder(Path(settings.tokenizer), settings.template)
    _state.update(work=UnitWork(settings, encoder, out, signed), told=told, stop=stop)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _run(unit: Unit) -> Done:
    return _state["work"].run(unit, _seen)


def _seen(num_bytes: int) -> None:
    if _state["stop"].value:
        raise Stopped
    with _state["told"].get_lock():
        _state["told"].value += num_bytes
