"""Models that do not fit together: each is loaded when its turn comes, in the order of `decide/swaps.py`.

A request enters its model's gate before it is answered and leaves it after. The model in place is closed when nobody is inside.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

from windlass.core.client import Client
from windlass.core.request import Delta, Info, Request, ScoreRequest, Scores
from windlass.tasks.route.decide.swaps import Arrivals, Waiting, hold_seconds, next_request, wait_until

Open = Callable[[], Awaitable[Client]]


class SwapGate:
    """One slot. `openers`: how each model is loaded; the client that is given back is closed when another one takes its place."""

    def __init__(self, openers: Mapping[str, Open], max_wait_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._openers, self._max_wait, self._clock = openers, max_wait_seconds, clock
        self._queue: list[tuple[Waiting, asyncio.Future[Client]]] = []
        self._arrivals = Arrivals()
        self._timer: asyncio.TimerHandle | None = None
        self._inside = self._number = 0
        self._client: Client | None = None
        self.loaded: str | None = None
        self.num_swaps = 0
        self.load_seconds = 0.0
        self.longest_wait = 0.0
        self._is_swapping = self._is_closed = False
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def enter(self, model: str) -> AsyncGenerator[Client]:
        turn: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._number += 1
        waiting = Waiting(number=self._number, model=model, arrived=self._clock())
        self._queue.append((waiting, turn))
        self._arrivals.add(model, waiting.arrived)
        self._admit()
        try:
            client = await turn
        except BaseException:
            self._queue = [entry for entry in self._queue if entry[1] is not turn]
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()
            raise
        self.longest_wait = max(self.longest_wait, self._clock() - waiting.arrived)
        try:
            yield client
        finally:
            self._leave()

    def _hold_seconds(self, queue: Sequence[Waiting]) -> float:
        each = self.load_seconds / self.num_swaps if self.num_swaps else 0.0
        return hold_seconds(queue, self.loaded, self._arrivals, each, self._max_wait)

    def _leave(self) -> None:
        self._inside -= 1
        self._admit()

    def _admit(self) -> None:
        """Lets in everybody whose turn it is. Who waits for another model comes after those inside have left."""
        while not self._is_swapping and self._queue and not self._is_closed:
            queue = [waiting for waiting, _ in self._queue]
            linger = self._hold_seconds(queue)
            chosen = next_request(queue, self.loaded, self._clock(), self._max_wait, linger)
            if chosen is None:
                left = wait_until(queue, self.loaded, self._max_wait, linger) - self._clock()
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = asyncio.get_running_loop().call_later(max(left, 0.001), self._admit)
                return
            if chosen.model != self.loaded or self._client is None:
                if self._inside == 0:
                    self._is_swapping = True
                    task = asyncio.get_running_loop().create_task(self._swap(chosen.model))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                return
            place = next(i for i, (waiting, _) in enumerate(self._queue) if waiting.number == chosen.number)
            _, turn = self._queue.pop(place)
            if not turn.done():
                self._inside += 1
                turn.set_result(self._client)

    async def _swap(self, model: str) -> None:
        began = self._clock()
        try:
            before, self._client, self.loaded = self._client, None, None
            if before is not None:
                await before.close()
            self._client = await self._openers[model]()
            self.loaded, self.num_swaps = model, self.num_swaps + 1
        except Exception as error:  # noqa: BLE001 - whoever waits for it hears why it did not load
            for waiting, turn in [entry for entry in self._queue if entry[0].model == model]:
                self._queue.remove((waiting, turn))
                if not turn.done():
                    turn.set_exception(error)
        finally:
            self.load_seconds += self._clock() - began
            self._is_swapping = False
        self._admit()

    async def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        client, self._client = self._client, None
        if client is not None:
            await client.close()


class GatedClient:
    """One model behind a gate, as a Client."""

    def __init__(self, gate: SwapGate, model: str) -> None:
        self._gate, self._model = gate, model

    @property
    def gate(self) -> SwapGate:
        return self._gate

    @property
    def is_loaded(self) -> bool:
        return self._gate.loaded == self._model

    def enter(self) -> AbstractAsyncContextManager[Client]:
        """The model itself, once it is its turn."""
        return self._gate.enter(self._model)

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        async with self.enter() as client, aclosing(client.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def score(self, request: ScoreRequest) -> Scores:
        async with self.enter() as client:
            return await client.score(request)

    async def info(self) -> Info:
        async with self.enter() as client:
            return await client.info()

    async def close(self) -> None:
        await self._gate.close()
