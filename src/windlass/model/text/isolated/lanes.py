"""Who is next: workers of one kind, shared fairly between groups of users (API keys, addresses), which take turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from windlass.core.client import Busy
from windlass.model.text.isolated.jobs import Answer, Compilation, Rendering, Task

MAX_WAITING = 1000
MAX_OWN_WAITING = 100
"""Of one group."""
MOST_SECONDS = 60.0
"""By the clock, for one job: a machine may be busy with other things."""


class Asked(Protocol):
    @property
    def has_ended(self) -> bool: ...
    async def ask(self, task: Task) -> Answer | None: ...
    def close(self) -> None: ...


class Lane:
    def __init__(self, start: Callable[[], Asked], num_workers: int, cpu_seconds: float) -> None:
        self._start, self._free, self.cpu_seconds = start, num_workers, cpu_seconds
        self._idle: list[Asked] = []
        self._age = 0
        """Workers of an earlier age are not used again."""
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """Groups in the order of their turns."""

    async def run(self, job: Rendering | Compilation, group: str) -> Answer | None:
        """None: its worker ended. Cancelling ends the worker too."""
        await self._turn(group)
        worker, age, answer = None, self._age, None
        try:
            worker = self._idle_worker() or self._start()
            async with asyncio.timeout(MOST_SECONDS):
                answer = await worker.ask(Task(job=job, cpu_seconds=self.cpu_seconds))
        except TimeoutError:
            pass
        finally:
            if worker is not None and answer is not None and not answer.is_last and age == self._age:
                self._idle.append(worker)
            elif worker is not None:
                worker.close()
            self._next()
        return answer

    def renew(self) -> None:
        """Jobs from now on go to new workers."""
        self._age += 1
        while self._idle:
            self._idle.pop().close()

    def _idle_worker(self) -> Asked | None:
        while self._idle:
            worker = self._idle.pop()
            if not worker.has_ended:  # killed from outside: not by the next job
                return worker
            worker.close()
        return None

    async def _turn(self, group: str) -> None:
        if self._free:
            self._free -= 1
            return
        own = self._waiting.setdefault(group, deque())
        if len(own) >= MAX_OWN_WAITING or sum(map(len, self._waiting.values())) >= MAX_WAITING:
            raise Busy("too many constraints or chats wait to be prepared; retry in a moment")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        own.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had just come
                self._next()
            raise

    def _next(self) -> None:
        """The turn goes to the group that has waited longest for one; without any the worker is free."""
        while self._waiting:
            group, own = next(iter(self._waiting.items()))
            del self._waiting[group]
            turn = own.popleft()
            if own:
                self._waiting[group] = own
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
