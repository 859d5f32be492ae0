"""Waiting for what must come: an end, an output, a process's death. No test here bounds time; these limits only end what hangs."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")
HUNG_SECONDS = 300.0
"""Far more than anything takes on a slow machine beside others."""


def finished(test: Coroutine[Any, Any, Result]) -> Result:
    """Of a test in an event loop of its own."""

    async def limited() -> Result:
        try:
            async with asyncio.timeout(HUNG_SECONDS) as limit:
                return await test
        except TimeoutError:
            if limit.expired():
                raise AssertionError(f"hung: not over after {HUNG_SECONDS:.0f} s") from None
            raise

    return asyncio.run(limited())


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + HUNG_SECONDS
    while not condition():
        assert time.monotonic() < end, f"hung: {what} did not come in {HUNG_SECONDS:.0f} s"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    """A zombie is over, whoever ought to bury it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until_gone(*pids: int) -> None:
    until(lambda: not any(map(is_running, pids)), f"the end of {pids}")


class OwnClock(asyncio.SelectorEventLoop):
    """An event loop whose time goes on only where nothing else is left to do, and then at once to what is waited for."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self.now


class _Skipping(selectors.DefaultSelector):
    def __init__(self, loop: OwnClock) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "hung: nothing is waited for that could come by itself"
        self._loop.now += max(timeout, 0.0)
        return super().select(0)
