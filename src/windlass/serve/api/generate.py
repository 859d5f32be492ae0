"""A request from its first byte to its last: read, let in, asked of the engine, answered or streamed; ended when its client goes away.

One task waits for the client's end; everything else happens in the request's own task, one write for every wake-up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing

from starlette.types import Receive, Scope, Send

from windlass.core.request import Delta, Request, Usage
from windlass.errors import Error
from windlass.serve.api.adapters import Asker, Events, Job, MakeJob, Whole
from windlass.serve.api.middleware import DETAILS, KEY
from windlass.serve.backend.in_flight import Flight
from windlass.serve.backend.merge import Batch, batches
from windlass.serve.http import errors as failures
from windlass.serve.http.asgi import EVENTS, Gone, send_bytes, start
from windlass.serve.http.protocol import ABORT
from windlass.serve.monitor.log import MAX_PROMPT_CHARACTERS
from windlass.serve.monitor.metrics import Watch
from windlass.serve.service import Service
from windlass.wire.schema.errors import Refusal
from windlass.wire.server.responses import error_event

SECONDS_FOR_LAST_WORDS = 1.0
LARGE_BYTES = 256 * 1024
"""A body of a hundred thousand messages or tools takes a second to be read, during which others must be served: then in a thread."""


class Answering:
    """An ASGI application: one of the two routes that ask the engine."""

    def __init__(self, service: Service, make_job: MakeJob) -> None:
        self._service, self._make_job = service, make_job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        arrived = time.perf_counter()
        try:
            job = await self._read(scope, receive)
            if service.settings.log_prompts:
                service.log.line(f"prompt: {shown_prompt(job.requests[0])}")
            with service.admitted(len(job.requests)) as flight:
                await _Answer(service, job, flight, scope, send, arrived).give(receive)
        except Refusal as refusal:
            service.metrics.ended(outcome(refusal))
            raise
        except Gone:
            service.metrics.ended("cancelled")
            raise

    async def _read(self, scope: Scope, receive: Receive) -> Job:
        raw = await self._service.bodies.read(scope, receive)
        _ = self._service.info  # 503 where there is nobody to ask, whatever is asked
        if len(raw) < LARGE_BYTES:
            return self._make_job(self._service, raw, asker(scope))
        return await asyncio.to_thread(self._make_job, self._service, raw, asker(scope))


def outcome(refusal: Refusal) -> str:
    known = {429: "full", 408: "late", 503: "unavailable", 500: "error"}
    return known.get(refusal.status, "refused")


def asker(scope: Scope) -> Asker:
    client = scope.get("client")
    return Asker(scope.get(KEY, 0), client[0] if client else "")


def shown_prompt(request: Request) -> str:
    text = (
        request.prompt if request.prompt is not None else request.messages if request.messages is not None else request.token_ids
    )
    return str(text)[:MAX_PROMPT_CHARACTERS]


class _Answer:
    """To one request that was let in."""

    def __init__(self, service: Service, job: Job, flight: Flight, scope: Scope, send: Send, arrived: float) -> None:
        self._service, self._job, self._flight, self._scope, self._send = service, job, flight, scope, send
        self._watches = [Watch(service.metrics, arrived) for _ in job.requests]
        self._ends: dict[int, Delta] = {}
        self._has_calls = False
        self._begun = False
        self._is_stream = bool(job.body.stream)

    async def give(self, receive: Receive) -> None:
        self._listening = listening = asyncio.create_task(_listen(receive, self._flight))
        deadline = self._job.requests[0].deadline_seconds or self._service.settings.deadline_seconds
        timer = asyncio.get_running_loop().call_later(deadline, self._flight.end, "late")
        try:
            form = await self._job.form()
            await (self._whole(form.whole) if form.events is None else self._stream(form.events))
            self._service.metrics.ended(self._finish())
        except asyncio.CancelledError:
            if not self._flight.was_ended():
                raise
            if self._flight.why == "gone":
                raise Gone from None
            await self._broken(failures.ended(self._flight.why))
        except Error as error:
            await self._broken(self._service.failed(error, self._job.body))
        finally:
            timer.cancel()
            listening.cancel()
            self._scope[DETAILS] = self._details()

    async def _stream(self, events: Events) -> None:
        send = self._send
        num_open = len(self._job.requests)
        async with aclosing(batches(self._service.client, self._job.requests)) as arriving:
            async for batch in arriving:
                num_open -= self._saw(batch)
                data = b"".join([events.event(index, delta) for index, delta in batch])
                if not num_open:
                    data += events.ending()
                    self._listening.cancel()  # whoever leaves now has it all
                if not self._begun:  # only now: an error before it has a status of its own
                    self._begun = True
                    await send(start(200, EVENTS))
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": num_open > 0})

    async def _whole(self, whole: Whole) -> None:
        choices: list[list[Delta]] = [[] for _ in self._job.requests]
        async with aclosing(batches(self._service.client, self._job.requests)) as arriving:
            async for batch in arriving:
                self._saw(batch)
                for index, delta in batch:
                    choices[index].append(delta)
        body = whole(choices)
        self._listening.cancel()
        self._begun = True
        await send_bytes(self._send, 200, body)

    def _saw(self, batch: Batch) -> int:
        """How many have ended with this."""
        ended = 0
        for index, delta in batch:
            self._watches[index].saw(delta)
            if delta.tool_calls:
                self._has_calls = True
            if delta.finish_reason is not None:
                self._ends[index] = delta
                ended += 1
        return ended

    async def _broken(self, refusal: Refusal) -> None:
        """Before the first byte it is an answer with a status; in the middle of a stream an event; in the middle of a whole answer the end."""
        if not self._begun:
            raise refusal
        if not self._is_stream:
            self._service.metrics.ended(outcome(refusal))
            self._scope.get(ABORT, _nothing)()
            return
        event = error_event(str(refusal), type=refusal.type, code=refusal.code)
        try:
            async with asyncio.timeout(SECONDS_FOR_LAST_WORDS):
                await self._send({"type": "http.response.body", "body": event, "more_body": False})
        except TimeoutError:  # a client that does not read would hold its place for ever
            self._scope.get(ABORT, _nothing)()
            raise Gone from None
        self._service.metrics.ended(outcome(refusal))

    def _finish(self) -> str:
        reasons = {delta.finish_reason for delta in self._ends.values()}
        if self._has_calls and "stop" in reasons:
            return "tool_calls"
        return "length" if "length" in reasons else "stop"

    def _details(self) -> str:
        usages = [delta.usage for delta in self._ends.values() if delta.usage is not None]
        told = tokens_line(usages)
        return f"{told}, {self._flight.why}" if self._flight.why else told


def tokens_line(usages: Sequence[Usage]) -> str:
    if not usages:
        return "unfinished"
    prompt, new = sum(one.prompt_tokens for one in usages), sum(one.completion_tokens for one in usages)
    cached = sum(one.cached_tokens for one in usages)
    return f"{prompt:,} + {new:,} tokens{f', {cached:,} cached' if cached else ''}"


def _nothing() -> None: ...


async def _listen(receive: Receive, flight: Flight) -> None:
    """Everything of the request has been read, so the next thing to hear is that the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
    flight.end("gone")
