"""Work that ends when its client disconnects or its time has passed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.types import Receive

from windlass.tasks.serve.backend.in_flight import InFlightRequest
from windlass.tasks.serve.http.asgi import ClientDisconnected
from windlass.tasks.serve.service import cancelled_error


@asynccontextmanager
async def interruptible(receive: Receive, seconds: float) -> AsyncGenerator[None]:
    """Cancels what is inside. The body must have been read before."""
    flight = InFlightRequest(0)
    watching = asyncio.create_task(wait_disconnect(receive, flight))
    timer = asyncio.get_running_loop().call_later(seconds, flight.cancel, "deadline")
    try:
        yield
    except asyncio.CancelledError:
        if not flight.was_cancelled():
            raise
        if flight.cancel_reason == "disconnected":
            raise ClientDisconnected from None
        raise cancelled_error(flight.cancel_reason) from None
    finally:
        timer.cancel()
        watching.cancel()


async def wait_disconnect(receive: Receive, flight: InFlightRequest) -> None:
    """The body has been read, so the next message can only be a disconnect."""
    while (await receive())["type"] != "http.disconnect":
        pass
    flight.cancel("disconnected")
