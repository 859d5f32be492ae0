"""Who is next: workers of one kind, shared fairly between groups of users (API keys, addresses), which take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from windlass.core.client import Busy
from windlass.model.text.isolated.jobs import Answer, Compilation, Rendering, Task
from windlass.model.text.isolated.workers import Lost

MAX_WAITING = 1000
MAX_OWN_WAITING = 100
"""Of one group, in a lane that has such limits."""
MOST_SECONDS = 60.0
"""By the clock, for one job: a machine may be busy with other things."""

Job = Rendering | Compilation


class Asked(Protocol):
    @property
    def has_ended(self) -> bool: ...
    async def ask(self, task: Task) -> Answer | None: ...
    def close(self) -> None: ...


class Lane:
    def __init__(
        self, start: Callable[[type[Job]], Asked], num_workers: int, cpu_seconds: float, *, is_limited: bool = True
    ) -> None:
        """`start`: a worker for jobs of this class. `is_limited`: how many may wait; where whoever asks has been admitted already, all may."""
        self._start, self._free, self.cpu_seconds, self._is_limited = start, num_workers, cpu_seconds, is_limited
        self._idle: dict[type[Job], list[Asked]] = {Rendering: [], Compilation: []}
        self._is_closed = False
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}
        """Groups in the order of their turns, and each one's in their order."""

    async def run(self, job: Job, group: str) -> Answer | None:
        """None: its worker ended. Cancelling ends the worker too. Busy: there is no room, or the worker did not end by itself."""
        await self._turn(group)
        try:
            try:
                return await self._ask(job)
            except Lost:
                return await self._ask(job)
        finally:
            self._next()

    def close(self) -> None:
        """Workers that are busy are ended after their job."""
        self._is_closed = True
        for idle in self._idle.values():
            while idle:
                idle.pop().close()

    async def _ask(self, job: Job) -> Answer | None:
        worker, answer = self._idle_worker(type(job)) or self._start(type(job)), None
        try:
            async with asyncio.timeout(MOST_SECONDS):
                answer = await worker.ask(Task(job=job, cpu_seconds=self.cpu_seconds))
            return answer
        except TimeoutError:
            raise Busy(f"a constraint or a chat was not ready after {MOST_SECONDS:.0f} s; retry in a moment") from None
        finally:
            if answer is not None and not answer.is_last and not self._is_closed:
                self._idle[type(job)].append(worker)
            else:
                worker.close()

    def _idle_worker(self, kind: type[Job]) -> Asked | None:
        while self._idle[kind]:
            worker = self._idle[kind].pop()
            if not worker.has_ended:  # killed from outside: not by the next job
                return worker
            worker.close()
        return None

    async def _turn(self, group: str) -> None:
        if self._free:
            self._free -= 1
            return
        self._check_room(group)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, {})[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had just come
                self._next()
            else:
                self._leave(group, turn)
            raise

    def _check_room(self, group: str) -> None:
        if not self._is_limited:
            return
        if len(self._waiting.get(group, ())) >= MAX_OWN_WAITING or sum(map(len, self._waiting.values())) >= MAX_WAITING:
            raise Busy("too many constraints or chats wait to be prepared; retry in a moment")

    def _leave(self, group: str, turn: asyncio.Future[None]) -> None:
        own = self._waiting.get(group, {})
        own.pop(turn, None)
        if not own:
            self._waiting.pop(group, None)

    def _next(self) -> None:
        """The turn goes to the group that has waited longest for one; without any the worker is free."""
        while self._waiting:
            group, own = next(iter(self._waiting.items()))
            del self._waiting[group]
            turn = next(iter(own))
            del own[turn]
            if own:
                self._waiting[group] = own
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
