"""Keeps the engine there: notices that it is gone or stuck, starts it anew, waits longer the more often it breaks.

A Client of an engine starts one when it is asked, so starting anew is asking for `info`. Meanwhile nothing else may ask: a request that
breaks the engine again and again must not start it as often as it comes. What runs beside the event loop is one task.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Literal

from windlass.core.client import Client, Unavailable
from windlass.core.request import Info
from windlass.errors import Error
from windlass.serve.backend.admission import clamped
from windlass.serve.monitor.log import without_paths

State = Literal["loading", "ready", "restarting", "dead"]
PROBE_SECONDS = 1.0
MEMORY_SECONDS = 60.0
"""Breakdowns before that are forgotten."""
LONGEST_PAUSE_SECONDS = 30.0
HOPELESS = 5
"""So many in a row without ever being ready, and it is called dead; it is still tried, rarely."""

Told = Callable[[str], None]
"""Where one-line events of an operator's interest go."""


def pause_seconds(breakdowns: int) -> float:
    """After so many within the last minute: at once, then 1, 2, 4, ... seconds."""
    return 0.0 if breakdowns <= 1 else min(2.0 ** (breakdowns - 2), LONGEST_PAUSE_SECONDS)


def state_after(breakdowns_in_a_row: int, was_ready: bool) -> State:
    if breakdowns_in_a_row >= HOPELESS:
        return "dead"
    return "restarting" if was_ready else "loading"


class Supervisor:
    """A client whose engine can be stuck has `restart`, which ends it; whose engine can be gone has `is_alive`; can move, `is_moving`."""

    def __init__(
        self,
        client: Client,
        stuck_seconds: float,
        told: Told = lambda _: None,
        probe_seconds: float = PROBE_SECONDS,
    ) -> None:
        self.client = client
        self.state: State = "loading"
        self.info: Info | None = None
        self.restarts = 0
        self.error: Error | None = None
        """Why it is not ready."""
        self._stuck_seconds, self._probe_seconds = stuck_seconds, probe_seconds
        self._told = told
        self._breakdowns: deque[float] = deque()
        self._in_a_row = 0
        self._again_at = 0.0
        self._woken = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        return self.state == "ready" and self._is_alive

    @property
    def _is_alive(self) -> bool:
        """Clients without a process of their own are alive as long as they answer."""
        return bool(getattr(self.client, "is_alive", True))

    @property
    def _is_moving(self) -> bool:
        """What is asked waits for an engine that is made elsewhere; it is neither gone nor stuck."""
        return bool(getattr(self.client, "is_moving", False))

    @property
    def retry_seconds(self) -> int:
        load = self.info.load_seconds if self.info is not None else 0.0
        return clamped(max(self._again_at - time.monotonic(), 0.0) + load)

    def suspect(self) -> None:
        """Somebody's request met an engine that was not there: look at once."""
        self._woken.set()

    async def became_ready(self) -> Info:
        """Or raises why the first start failed; whoever waits for it decides whether there is a second."""
        while self.info is None:
            if self.error is not None:
                raise self.error
            self._changed.clear()
            await self._changed.wait()
        return self.info

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._look()
            except Error as error:
                await self._broke(error)
            except Exception as error:  # noqa: BLE001 - a full disk, too many processes: whatever it is, it is tried again
                await self._broke(Unavailable(f"{type(error).__name__}: {error}"))
            else:
                self._woken.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._probe_seconds):
                        await self._woken.wait()

    async def _look(self) -> None:
        if self.state == "ready" and not self._is_alive:
            raise Unavailable("the engine's process is gone")
        # Loading takes as long as it takes; an engine that is ready answers between two steps.
        patience = self._stuck_seconds if self.state == "ready" else None
        try:
            async with asyncio.timeout(patience):
                info = await self.client.info()
        except TimeoutError:
            if self._is_moving:  # which takes as long as loading does
                return
            await self._give_up()
            raise Unavailable(f"the engine said nothing for {self._stuck_seconds:g} s") from None
        if self.state != "ready":
            self._told("the engine is ready" if self.restarts == 0 else "the engine is ready again")
        self.state, self.info, self.error, self._in_a_row = "ready", info, None, 0
        self._changed.set()

    async def _give_up(self) -> None:
        """Not ready while it is being ended."""
        self.state = "restarting"
        restart: Callable[[], Awaitable[None]] | None = getattr(self.client, "restart", None)
        if restart is not None:
            await restart()

    async def _broke(self, error: Error) -> None:
        now = time.monotonic()
        self._breakdowns.append(now)
        while self._breakdowns[0] < now - MEMORY_SECONDS:
            self._breakdowns.popleft()
        self._in_a_row += 1
        self.restarts += 1
        self.error, self.state = error, state_after(self._in_a_row, self.info is not None)
        pause = pause_seconds(len(self._breakdowns))
        self._again_at = now + pause
        self._told(f"the engine broke down ({without_paths(str(error))}); it is started anew in {pause:g} s")
        self._changed.set()
        await asyncio.sleep(pause)
