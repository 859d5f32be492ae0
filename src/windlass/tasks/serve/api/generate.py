"""The generation endpoints: read the body, admit, run on the engine, send the response or stream; cancel on disconnect.

One extra task waits for a disconnect; everything else runs in the request's own task, with one write per wake-up.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing

import msgspec
from starlette.types import Message, Receive, Scope, Send

from windlass.core.request import Delta, Request, Usage
from windlass.errors import Error
from windlass.tasks.serve.api.adapters import EventWriter, GenerationJob, MakeJob, WriteResponse, expected_tokens
from windlass.tasks.serve.api.caller import Caller, caller_of, request_id
from windlass.tasks.serve.api.interrupt import wait_disconnect
from windlass.tasks.serve.api.middleware import DETAILS
from windlass.tasks.serve.backend.in_flight import InFlightRequest
from windlass.tasks.serve.backend.merge import Batch, merge_streams
from windlass.tasks.serve.http.asgi import ClientDisconnected, Header, response_start, send_response
from windlass.tasks.serve.http.protocol import ABORT
from windlass.tasks.serve.monitor.log import MAX_PROMPT_CHARACTERS
from windlass.tasks.serve.monitor.metrics import SequenceTimer
from windlass.tasks.serve.service import Service, cancelled_error
from windlass.wire.schema.errors import ApiError, renamed

ERROR_EVENT_SECONDS = 1.0
MAX_HEADER_SECONDS = 1.0
"""After which the headers of a stream are sent even if the engine has not accepted the request yet."""
MAX_NOTE_CHARACTERS = 200
_UNSAFE = re.compile(r"[^\x20-\x7e]")


class GenerateEndpoint:
    """An ASGI application: chats or completions in any of the APIs."""

    def __init__(self, service: Service, make_job: MakeJob) -> None:
        self._service, self._make_job = service, make_job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        arrived = time.perf_counter()
        try:
            caller = caller_of(scope)
            job, num_bytes = await self._read(scope, receive, caller)
            service.check_quota(caller.key)
            if service.settings.log_prompts:
                service.log.line(f"prompt: {prompt_text(job.requests[0])}")
            held = service.quotas.holding(caller.key, expected_tokens(job, num_bytes))
            with held, service.admitted(len(job.requests), caller.share) as flight:
                await _Generation(service, job, flight, scope, send, arrived).run(receive, caller)
        except ApiError as refusal:
            service.metrics.count_outcome(outcome(refusal))
            raise
        except ClientDisconnected:
            service.metrics.count_outcome("cancelled")
            raise

    async def _read(self, scope: Scope, receive: Receive, caller: Caller) -> tuple[GenerationJob, int]:
        """And the size of the body."""
        raw = await self._service.body_reader.read(scope, receive)
        _ = self._service.info  # raises 503 if the engine is not ready, before the body is looked at
        job = await self._service.body_reader.parsed(raw, lambda raw: self._make_job(self._service, raw, caller))
        return job, len(raw)


def outcome(refusal: ApiError) -> str:
    known = {429: "full", 408: "late", 503: "unavailable", 500: "error"}
    return known.get(refusal.status, "refused")


def prompt_text(request: Request) -> str:
    text = (
        request.prompt if request.prompt is not None else request.messages if request.messages is not None else request.token_ids
    )
    return str(text)[:MAX_PROMPT_CHARACTERS]


class _Generation:
    """One admitted request."""

    def __init__(
        self, service: Service, job: GenerationJob, flight: InFlightRequest, scope: Scope, send: Send, arrived: float
    ) -> None:
        self._service, self._job, self._flight, self._scope, self._send = service, job, flight, scope, send
        self._timers = [SequenceTimer(service.metrics, arrived) for _ in job.requests]
        self._ends: dict[int, Delta] = {}
        self._so_far: dict[int, Usage] = {}
        self._num_tokens = [0] * len(job.requests)
        self._has_calls = False
        self._notes: list[Header] = []
        self._started = False
        self._starting: asyncio.Future[None] | None = None
        self._events: EventWriter | None = None

    async def run(self, receive: Receive, caller: Caller) -> None:
        self._disconnect_task = disconnect_task = asyncio.create_task(wait_disconnect(receive, self._flight))
        deadline = self._job.requests[0].deadline_seconds or self._service.settings.deadline_seconds
        timer = asyncio.get_running_loop().call_later(deadline, self._flight.cancel, "deadline")
        try:
            writer = await self._job.writer()
            self._events = writer.events
            await (self._respond(writer.whole) if writer.events is None else self._stream(writer.events))
            self._service.metrics.count_outcome(self._finish())
        except asyncio.CancelledError:
            if not self._flight.was_cancelled():
                raise
            if self._flight.cancel_reason == "disconnected":
                raise ClientDisconnected from None
            await self._fail(cancelled_error(self._flight.cancel_reason))
        except Error as error:
            refusal = self._service.api_error(error, self._job.body, request_id(self._scope))
            await self._fail(renamed(refusal, self._job.params))
        finally:
            timer.cancel()
            disconnect_task.cancel()
            usages = self._usages()
            self._service.charge(caller.key, usages)
            self._service.request_ended(self._flight, self._scope.get("path", ""), usages, list(self._ends.values()))
            self._scope[DETAILS] = self._details()

    async def _stream(self, events: EventWriter) -> None:
        """Headers are sent when the engine accepts the request, so that an error before that has its own status."""
        send = self._send
        num_open = len(self._job.requests)
        kept: list[list[Delta]] | None = None if self._job.finished is None else [[] for _ in self._job.requests]
        late = asyncio.get_running_loop().call_later(MAX_HEADER_SECONDS, self._start_now)
        try:
            async with aclosing(merge_streams(self._service.client, self._job.requests)) as arriving:
                async for batch in arriving:
                    num_open -= self._observe(batch)
                    data = b"".join([events.event(index, delta) for index, delta in batch])
                    if kept is not None:
                        _keep(kept, batch)
                    if not num_open:
                        self._finished(kept)
                        data += events.ending()
                        self._disconnect_task.cancel()  # a client that disconnects now has received everything
                    if not self._started or self._starting is not None:
                        await self._start()
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": num_open > 0})
        finally:
            late.cancel()

    def _start_now(self) -> None:
        """The engine has not accepted the request yet; it waits for a grammar, or for hosts."""
        if not self._started:
            self._started = True
            self._starting = asyncio.ensure_future(self._send(self._headers()))

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            await self._send(self._headers())
        elif self._starting is not None:
            starting, self._starting = self._starting, None
            await starting

    def _headers(self) -> Message:
        return response_start(200, self._job.media_type, headers=[*self._job.headers, *self._notes])

    def _finished(self, choices: list[list[Delta]] | None) -> None:
        if choices is not None and self._job.finished is not None:
            self._job.finished(choices)

    async def _respond(self, whole: WriteResponse) -> None:
        choices: list[list[Delta]] = [[] for _ in self._job.requests]
        async with aclosing(merge_streams(self._service.client, self._job.requests)) as arriving:
            async for batch in arriving:
                self._observe(batch)
                _keep(choices, batch)
        body = whole(choices)
        self._finished(choices)
        self._disconnect_task.cancel()
        self._started = True
        await send_response(self._send, 200, body, headers=[*self._job.headers, *self._notes, *self._job.verdict(choices)])

    def _observe(self, batch: Batch) -> int:
        """How many sequences finished in this batch."""
        ended = 0
        for place, (index, delta) in enumerate(batch):
            if delta.token_ids:
                self._count(index, delta)
            if delta.usage is not None:
                self._so_far[index] = delta.usage
            if delta.tool_calls:
                self._has_calls = True
            if delta.notes:
                self._notes = note_headers(delta.notes)
            if delta.finish_reason is not None:
                self._ends[index] = delta
                self._timers[index].finished(delta)
                ended += 1
                if self._service.settings.usage_energy and len(self._ends) == len(self._job.requests):
                    batch[place] = (index, self._with_energy(delta))
        return ended

    def _with_energy(self, delta: Delta) -> Delta:
        """The request's energy in the usage of the sequence that ends last."""
        joules = self._service.energy.used(self._flight)
        if joules is None or delta.usage is None:
            return delta
        return msgspec.structs.replace(delta, usage=msgspec.structs.replace(delta.usage, energy_joules=joules))

    def _count(self, index: int, delta: Delta) -> None:
        """Tokens so far, for metrics, for the list of requests and for their energy; a prompt counts with the first token."""
        number, flight = len(delta.token_ids), self._flight
        now = self._timers[index].tokens(number)
        if not self._num_tokens[index]:
            usage = delta.usage or self._so_far.get(index)
            if usage is not None:
                flight.prompt_tokens += usage.prompt_tokens
                flight.unsettled_tokens += usage.prompt_tokens - usage.cached_tokens
            flight.first_token = flight.first_token or now
        self._num_tokens[index] += number
        flight.num_tokens += number
        flight.unsettled_tokens += number

    async def _fail(self, refusal: ApiError) -> None:
        """Before the first byte: an error response. In a stream: an error event. In a complete response: the connection is closed."""
        if not self._started:
            raise refusal
        if self._events is None:
            self._service.metrics.count_outcome(outcome(refusal))
            self._scope.get(ABORT, _no_abort)()
            return
        event = self._events.failed(refusal)
        try:
            async with asyncio.timeout(ERROR_EVENT_SECONDS):
                await self._start()
                await self._send({"type": "http.response.body", "body": event, "more_body": False})
        except TimeoutError:  # a client that does not read must not stay in flight
            self._scope.get(ABORT, _no_abort)()
            raise ClientDisconnected from None
        self._service.metrics.count_outcome(outcome(refusal))

    def _finish(self) -> str:
        reasons = {delta.finish_reason for delta in self._ends.values()}
        if self._has_calls and "stop" in reasons:
            return "tool_calls"
        return "length" if "length" in reasons else "stop"

    def _usages(self) -> list[Usage]:
        """What was used: of answers that ended, as the engine counted; of others, what arrived."""
        ended = {index: delta.usage for index, delta in self._ends.items() if delta.usage is not None}
        unended = {
            index: self._arrived(index) for index, number in enumerate(self._num_tokens) if number or index in self._so_far
        }
        return list((unended | ended).values())

    def _arrived(self, index: int) -> Usage:
        """A client may say at the beginning how long the prompt is, and only at the end how long the output is."""
        said, number = self._so_far.get(index, Usage(prompt_tokens=0, completion_tokens=0)), self._num_tokens[index]
        return msgspec.structs.replace(said, completion_tokens=max(said.completion_tokens, number))

    def _details(self) -> str:
        usages = [delta.usage for delta in self._ends.values() if delta.usage is not None]
        text = usage_text(usages)
        routed = "".join(f", {value.decode()}" for name, value in self._notes if name.endswith(b"-model"))
        return f"{text}{routed}, {self._flight.cancel_reason}" if self._flight.cancel_reason else f"{text}{routed}"


def _keep(choices: list[list[Delta]], batch: Batch) -> None:
    for index, delta in batch:
        choices[index].append(delta)


def usage_text(usages: Sequence[Usage]) -> str:
    if not usages:
        return "unfinished"
    prompt, new = sum(one.prompt_tokens for one in usages), sum(one.completion_tokens for one in usages)
    cached = sum(one.cached_tokens for one in usages)
    return f"{prompt:,} + {new:,} tokens{f', {cached:,} cached' if cached else ''}"


def note_headers(notes: Mapping[str, str]) -> list[Header]:
    """How it was answered, as a router says. Prompts do not stand in notes; names of models may hold any character."""
    return [(name.encode(), _UNSAFE.sub("?", value)[:MAX_NOTE_CHARACTERS].encode()) for name, value in notes.items()]


def _no_abort() -> None: ...
