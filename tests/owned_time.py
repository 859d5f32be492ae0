"""Time that belongs to a test: an event loop whose clock moves only when nothing is left to do but to wait for it.

Then it goes straight to the next moment that somebody sleeps until, so that hours pass at once, and how busy the machine is does not matter.
For what happens in memory alone: a loop cannot know whether something will still come through a socket. Work in threads is waited for.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, TypeVar

from waiting import HUNG_SECONDS

Result = TypeVar("Result")


class OwnedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now, self._aside = 0.0, 0
        super().__init__(_Waiting(self))

    def time(self) -> float:
        return self._now

    def run_in_executor(self, *given: Any) -> Any:
        found = super().run_in_executor(*given)
        self._aside += 1
        found.add_done_callback(self._is_back)
        return found

    def _is_back(self, _: object) -> None:
        self._aside -= 1


class _Waiting(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def __init__(self, loop: OwnedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if (found := super().select(0)) or (timeout is not None and timeout <= 0):
            return found
        if self._loop._aside or timeout is None:  # a thread will say something, or nothing ever will
            found = super().select(HUNG_SECONDS)
            assert found, "hung: nobody does anything any more"
            return found
        self._loop._now += timeout
        return []


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run, in time of its own."""
    with asyncio.Runner(loop_factory=OwnedLoop) as runner:
        return runner.run(work)


def clock() -> SimpleNamespace:
    """In a module's `time`: the monotonic clock is that of the loop that runs."""
    return SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
