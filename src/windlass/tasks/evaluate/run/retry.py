"""When a failed request is asked again, and when a server is waited for. `Attendance` is the only part with effects."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Literal

from windlass.core.client import Broken, Busy, Client, Late, Unavailable
from windlass.errors import BadInput, Error

MAX_ATTEMPTS = 6
FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS = 0.5, 30.0
POLL_SECONDS = 1.0

MAX_BUSY_DELAY_SECONDS = 4.0

Kind = Literal["again", "busy", "wait", "refused"]
"""again: an answer was lost; busy: it was not begun, which costs no attempt; wait: the server is gone; refused: it would fail the same way."""


def kind_of(error: Error) -> Kind:
    match error:
        case Busy():
            return "busy"
        case Late() | Broken():
            return "again"
        case Unavailable():
            return "wait"
        case BadInput():
            return "refused"
        case _:
            return "again"


def delay_seconds(attempt: int, retry_after: float | None, draw: Callable[[], float] = random.random) -> float:
    """Exponential with jitter; never sooner than the server said."""
    backoff = min(FIRST_DELAY_SECONDS * 2 ** (attempt - 1), MAX_DELAY_SECONDS) * (0.5 + draw())
    return max(backoff, retry_after or 0.0)


def busy_delay_seconds(times: int, retry_after: float | None, draw: Callable[[], float] = random.random) -> float:
    """Shorter: others of the same evaluation finish meanwhile, and the server should stay full."""
    return min(delay_seconds(times, None, draw), MAX_BUSY_DELAY_SECONDS) + (retry_after or 0.0) * draw()


class Attendance:
    """Whether the server is there. While it is not, one caller asks for it and the others wait."""

    def __init__(self, client: Client, patience_seconds: float, notify: Callable[[str], None] = lambda _: None) -> None:
        self._client, self._patience, self._notify = client, patience_seconds, notify
        self._lock = asyncio.Lock()
        self._back_at = 0.0

    async def wait(self, failed_at: float, why: Error) -> None:
        """Returns when the server answers again; `failed_at`: when the failed request began."""
        async with self._lock:
            if self._back_at > failed_at:
                return  # somebody else waited meanwhile
            self._notify(f"waiting for the server: {why}")
            until = time.monotonic() + self._patience
            while True:
                try:
                    await self._client.info()
                except Unavailable as error:
                    if time.monotonic() > until:
                        raise Unavailable(
                            f"{error} (waited {self._patience:g} s); what came is saved: --resume goes on"
                        ) from None
                    await asyncio.sleep(POLL_SECONDS)
                else:
                    self._back_at = time.monotonic()
                    return
