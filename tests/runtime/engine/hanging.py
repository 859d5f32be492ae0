"""Waiting for what must come: an end, an output, a process's death. No test here bounds time; these limits only end what hangs."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from waiting import HUNG_SECONDS

Result = TypeVar("Result")


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
