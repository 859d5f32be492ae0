"""Supervises the engine: detects that it has exited or hangs, and restarts it with exponential backoff.

An engine's Client starts the engine on demand, so a restart is a call of `info`. Other requests are rejected meanwhile: one that
crashes the engine repeatedly must not restart it every time. Runs as one task on the event loop.
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
from windlass.tasks.serve.backend.admission import clamp_retry_seconds

State = Literal["loading", "ready", "restarting", "dead", "unloaded"]
PROBE_SECONDS = 1.0
FAILURE_WINDOW_SECONDS = 60.0
"""Failures older than this no longer count for the backoff."""
MAX_BACKOFF_SECONDS = 30.0
MAX_FAILED_STARTS = 5
"""After this many failures in a row the state is `dead`; restarts are still tried, rarely."""

OnEvent = Callable[[str], None]
"""Receives one-line events for the operator."""


def backoff_seconds(failures: int) -> float:
    """By failures within the last minute: no delay, then 1, 2, 4, ... seconds."""
    return 0.0 if failures <= 1 else min(2.0 ** (failures - 2), MAX_BACKOFF_SECONDS)


def state_after(consecutive_failures: int, was_ready: bool) -> State:
    if consecutive_failures >= MAX_FAILED_STARTS:
        return "dead"
    return "restarting" if was_ready else "loading"


class Supervisor:
    """Optional members of the client: `restart` kills a hung engine, `is_alive` reports its exit, `is_moving` a move to other hosts."""

    def __init__(
        self,
        client: Client,
        stuck_seconds: float,
        on_event: OnEvent = lambda _: None,
        probe_seconds: float = PROBE_SECONDS,
    ) -> None:
        self.client = client
        self.state: State = "loading"
        self.info: Info | None = None
        self.restarts = 0
        self.error: Error | None = None
        """Why the engine is not ready."""
        self._stuck_seconds, self._probe_seconds = stuck_seconds, probe_seconds
        self._on_event = on_event
        self._failures: deque[float] = deque()
        self._consecutive = 0
        self._retry_at = 0.0
        self._wakeup = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        return self.state == "ready" and self._is_alive

    @property
    def _is_alive(self) -> bool:
        """Clients without an engine process count as alive while they answer."""
        return bool(getattr(self.client, "is_alive", True))

    @property
    def _is_moving(self) -> bool:
        """Requests wait while the engine is rebuilt on other hosts; it has neither exited nor hung."""
        return bool(getattr(self.client, "is_moving", False))

    @property
    def retry_seconds(self) -> int:
        load = self.info.load_seconds if self.info is not None else 0.0
        return clamp_retry_seconds(max(self._retry_at - time.monotonic(), 0.0) + load)

    def check_now(self) -> None:
        """A request found the engine unavailable: probe at once."""
        self._wakeup.set()

    async def wait_ready(self) -> Info:
        """Raises the error if the first start fails; the caller decides whether to go on."""
        while self.info is None:
            if self.error is not None:
                raise self.error
            self._changed.clear()
            await self._changed.wait()
        return self.info

    async def unload(self) -> None:
        """Ends the engine, while `run` does not run; the next `run` starts it again."""
        self.state, self.info, self.error, self._consecutive = "unloaded", None, None, 0
        end: Callable[[], Awaitable[None]] | None = getattr(self.client, "unload", None)
        if end is not None:
            await end()

    async def run(self) -> None:
        """Until cancelled."""
        self.state = "loading" if self.state == "unloaded" else self.state
        while True:
            try:
                await self._probe()
            except Error as error:
                await self._on_failure(error)
            except Exception as error:  # noqa: BLE001 - a full disk, too many processes: any failure is retried
                await self._on_failure(Unavailable(f"{type(error).__name__}: {error}"))
            else:
                self._wakeup.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._probe_seconds):
                        await self._wakeup.wait()

    async def _probe(self) -> None:
        if self.state == "ready" and not self._is_alive:
            raise Unavailable("the engine process has exited")
        # Loading has no time limit; a ready engine answers between two steps.
        timeout = self._stuck_seconds if self.state == "ready" else None
        try:
            async with asyncio.timeout(timeout):
                info = await self.client.info()
        except TimeoutError:
            if self._is_moving:  # takes as long as loading
                return
            await self._restart_stuck()
            raise Unavailable(f"the engine did not respond for {self._stuck_seconds:g} s") from None
        if self.state != "ready":
            self._on_event("engine ready" if self.restarts == 0 else "engine ready again")
        self.state, self.info, self.error, self._consecutive = "ready", info, None, 0
        self._changed.set()

    async def _restart_stuck(self) -> None:
        """Not ready while the hung engine is being killed."""
        self.state = "restarting"
        restart: Callable[[], Awaitable[None]] | None = getattr(self.client, "restart", None)
        if restart is not None:
            await restart()

    async def _on_failure(self, error: Error) -> None:
        now = time.monotonic()
        self._failures.append(now)
        while self._failures[0] < now - FAILURE_WINDOW_SECONDS:
            self._failures.popleft()
        self._consecutive += 1
        self.restarts += 1
        self.error, self.state = error, state_after(self._consecutive, self.info is not None)
        delay = backoff_seconds(len(self._failures))
        self._retry_at = now + delay
        self._on_event(f"engine failed ({error}); restarting in {delay:g} s")
        self._changed.set()
        await asyncio.sleep(delay)
