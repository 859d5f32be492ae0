"""A fleet whose rank 0 runs in this process, with the fleet on an event loop in a thread: for measuring step by step. No torch."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Self

import msgspec

from windlass.core.client import Unavailable
from windlass.core.launch import RankJob
from windlass.core.request import Info
from windlass.errors import Error
from windlass.runtime.engine.client.transport import EngineTransport, Lost, Receive
from windlass.runtime.engine.protocol import Command, EngineReady, Report
from windlass.runtime.fleet.root.epoch import MakeEngine
from windlass.runtime.fleet.root.root import Fleet
from windlass.runtime.fleet.root.step_times import RankTime, rank_times
from windlass.runtime.parallel.group import GroupLost

SECONDS_TO_CLOSE = 20.0
SECONDS_TO_KNOW = 6.0
"""Until it is known which worker was lost: silence is noticed after 4 s."""


class InlineFleet:
    """A context manager. `make_fleet` gets the function that makes rank 0's transport."""

    def __init__(self, make_fleet: Callable[[MakeEngine], Fleet]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="windlass-fleet", daemon=True)
        self._thread.start()
        self._job: Future[RankJob] = Future()
        self._lost: Error | None = None
        self._is_over = threading.Event()
        self._engine: InlineTransport | None = None
        self.fleet = make_fleet(self._engine_here)

    def job(self) -> RankJob:
        """Rank 0's job, once the other ranks have been started. Raises what kept them from starting."""
        self._loop.call_soon_threadsafe(self._open)
        return self._job.result()

    def ready(self, info: Info) -> None:
        assert self._engine is not None
        self._loop.call_soon_threadsafe(self._engine.ready, info)

    def watch(self, run: Callable[[], Sequence[float]]) -> list[RankTime]:
        """`run` takes steps and returns the seconds of each; the result says where they went, on every rank."""
        plan, names = self.fleet.plan, self.fleet.rank_machines
        if self._lost is not None or plan is None:
            raise self._lost or Unavailable("the epoch is over")
        before = self._wait(self.fleet.heartbeats())
        seconds = run()
        after = self._wait(self.fleet.heartbeats())
        return rank_times(before, after, plan.layout, names, sum(seconds), len(seconds))

    @contextmanager
    def explained(self) -> Generator[None]:
        """Rank 0 sees only that its group is lost; the fleet knows which worker it was, and why."""
        try:
            yield
        except (GroupLost, ConnectionError) as error:
            self._is_over.wait(SECONDS_TO_KNOW)
            raise Unavailable(f"{self._lost or error}; run the measurement again") from error

    def close(self) -> None:
        self._wait(self.fleet.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS_TO_CLOSE)
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _engine_here(self, job: RankJob, supervised: socket.socket | None) -> EngineTransport:
        self._engine = InlineTransport(job, supervised, self._job)
        return self._engine

    def _open(self) -> None:
        self.fleet.transport().open(self._receive, self._is_lost)

    def _receive(self, report: Report) -> None:
        """The caller, which loads the engine, needs no reports."""

    def _is_lost(self, error: Error) -> None:
        self._lost = error
        self._is_over.set()
        if not self._job.done():
            self._job.set_exception(error)

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class InlineTransport:
    """Hands the job to this process, which loads the engine itself."""

    def __init__(self, job: RankJob, supervised: socket.socket | None, given: Future[RankJob]) -> None:
        self._job, self._given = msgspec.structs.replace(job, is_inline=True), given
        if supervised is not None:
            supervised.detach()  # the job has its descriptor; the loader owns it

    def open(self, receive: Receive, lost: Lost) -> None:
        self._receive = receive
        if not self._given.done():
            self._given.set_result(self._job)

    def ready(self, info: Info) -> None:
        self._receive(EngineReady(info))

    def send(self, command: Command) -> None:
        """Requests do not go through it."""

    def kill(self) -> None:
        """It would be this process."""

    async def close(self) -> None:
        pass
