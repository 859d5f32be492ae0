"""For the operator: requests in flight, cancelling one, alerts and the history of a day."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Receive, Scope, Send

from windlass.core.model import Frozen
from windlass.tasks.serve.api.endpoints import send_json
from windlass.tasks.serve.http import errors
from windlass.tasks.serve.service import Service
from windlass.wire.schema.errors import ApiError


class RequestRow(Frozen):
    """A request in flight: numbers only, never its text."""

    number: int
    age_seconds: float
    state: str
    """`waiting` for its first token, or `running`."""
    sequences: int
    prompt_tokens: int
    tokens: int
    tokens_per_second: float
    owner: str
    """The key or address whose share of the queue it takes."""


class RequestRows(Frozen):
    requests: list[RequestRow]


class Cancelled(Frozen):
    number: int


async def requests(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    now = time.perf_counter()
    rows = [
        RequestRow(
            number=flight.number,
            age_seconds=round(now - flight.started, 3),
            state="waiting" if flight.first_token is None else "running",
            sequences=flight.num_sequences,
            prompt_tokens=flight.prompt_tokens,
            tokens=flight.num_tokens,
            tokens_per_second=0.0
            if flight.first_token is None
            else round(flight.num_tokens / max(now - flight.first_token, 0.05), 2),
            owner=flight.share,
        )
        for flight in service.all_in_flight()
    ]
    await send_json(send, RequestRows(requests=rows))


async def cancel(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    text = str(scope["path_params"]["number"])
    number = int(text) if text.isdecimal() and len(text) < 19 else 0
    if not any(one.in_flight.cancel(number, "operator") for one in service.group):
        raise ApiError("no such request is in flight", code="not_found", status=404)
    service.log.line(f"request {number} cancelled by the operator")
    await send_json(send, Cancelled(number=number))


async def history(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Charts are computed in a thread: a tenth of a second for a day."""
    if service.watch is None:
        raise errors.not_found()
    await send_json(send, await asyncio.to_thread(service.watch.watched))
