"""Concurrent requests over one transport to an engine: starts it on demand, routes outputs, replays requests when it is lost. No torch.

Requests that were running when an engine was lost are submitted to the next one, which continues after the tokens already returned: the
caller sees a pause. Without limit when engines move; a limited number of times when engines crash, since a request may be the cause. Those
that may be are submitted one after another, and nothing new beside them. Only one that was there at a crash, and was alone with the engine at
another, is their cause: it fails, and is refused for a while. If there were others, the one that came last is tried alone next.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

from windlass.core.client import Broken, Late, Unavailable
from windlass.core.request import ADDRESS, Info
from windlass.errors import Error
from windlass.model.text.isolated.offenders import Offenders, group_of
from windlass.runtime.engine.client.replay import EngineKilled, EngineMoved, PendingRequest, submit_digest
from windlass.runtime.engine.client.transport import EngineTransport
from windlass.runtime.engine.protocol import (
    AdapterChanged,
    AddAdapter,
    Cancel,
    EngineFailed,
    EngineReady,
    InfoReply,
    InfoRequest,
    LoadProgress,
    RemoveAdapter,
    Report,
    RequestRejected,
    SequenceOutput,
    StepOutputs,
    Submit,
    TokenizerData,
    as_error,
    timeout_message,
)

Progress = Callable[[int, int], None]
"""Bytes loaded, and of how many."""
REFUSED_SECONDS = 600.0
MAX_REFUSED = 1000
MOST_CRASHES = 1
"""By requests of one key within that time; with more it is refused. An address is not: many may share it."""
ENDED_ENGINES = "this request ended the engine twice{how}; it is refused for ten minutes"


class EngineRequests:
    def __init__(
        self,
        make_transport: Callable[[], EngineTransport],
        progress: Progress | None = None,
        vocabulary: Callable[[], TokenizerData] | None = None,
        max_crashes: int = 0,
    ) -> None:
        """`vocabulary` is sent to an engine once, before the first request with a grammar. `max_crashes`: engine crashes a request
        survives."""
        self._make_transport, self._progress, self._vocabulary = make_transport, progress, vocabulary
        self._max_crashes = max_crashes
        self._connection: _Connection | None = None
        self._lost: list[_Connection] = []
        self._refused: dict[bytes, float] = {}
        """Digests of requests that ended two engines, and when."""
        self._offenders = Offenders(MOST_CRASHES, REFUSED_SECONDS)
        self._numbers = 0
        self._is_closed = False

    @property
    def is_alive(self) -> bool:
        """Whether an engine is ready or moving."""
        return self._connection is not None and (self._connection.is_ready or self.is_moving)

    @property
    def is_moving(self) -> bool:
        """Requests wait for an engine that is being restarted on other machines."""
        connection = self._connection
        return connection is not None and connection.replaces_moved and not connection.is_lost and not connection.info.done()

    @property
    def ready_info(self) -> Info | None:
        """Of an engine that is ready now."""
        connection = self._connection
        return connection.info.result() if connection is not None and connection.is_ready else None

    async def ready(self) -> Info:
        """Starts the engine if there is none, and waits for it. Cancelling does not stop the loading."""
        while True:
            with suppress(EngineMoved):
                return await asyncio.shield(self._connected().info)

    async def outputs(self, submit: Submit) -> AsyncGenerator[list[SequenceOutput], None]:
        """Batches of outputs as they arrive; `submit.id` is chosen here. Closing the generator cancels the request."""
        self._check_refused(submit)
        await self.ready()
        self._check_refused(submit)  # others like it may have been waited for
        self._numbers += 1
        pending, finished = PendingRequest(self._numbers, submit), False
        timer = self._deadline(submit, pending)
        try:
            self._connected().adopt(pending)
            while not finished:
                found = await pending.outputs()
                finished = found[-1].finish is not None
                yield found
        finally:
            if timer is not None:
                timer.cancel()
            if self._connection is not None:
                self._connection.drop(pending, is_finished=finished)

    async def info(self) -> Info:
        """With current statistics."""
        while True:
            with suppress(EngineMoved):
                await self.ready()
                return await self._connected().fetch_info(self._next_number())

    async def change(self, command: Callable[[int], AddAdapter | RemoveAdapter]) -> None:
        """Of the engine that runs now; returns while it still does. Unavailable: there is none, or it was lost meanwhile."""
        connection = self._connection
        if connection is None or not connection.is_ready:
            raise Unavailable("no engine runs")
        await connection.change(command(self._next_number()))
        if connection is not self._connection or connection.is_lost:
            raise Unavailable("the engine was lost")

    async def restart(self) -> None:
        """Kills the current engine; the next one continues its requests."""
        connection = self._connection
        if connection is None or connection.is_lost:
            return
        connection.transport.kill()
        error = EngineKilled("the engine was stuck and is being restarted; retry")
        self._on_lost(connection, connection.end(error), error)
        await connection.close()

    async def unload(self) -> None:
        """Ends the engine and waits until its process is gone; the next request starts another."""
        connections = [*self._lost, *([self._connection] if self._connection is not None else [])]
        self._connection, self._lost = None, []
        for connection in connections:
            await connection.close()

    async def close(self) -> None:
        self._is_closed = True
        await self.unload()

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    @staticmethod
    def _deadline(submit: Submit, pending: PendingRequest) -> asyncio.TimerHandle | None:
        """The engine expires requests itself; this is for an engine in a long step, stuck, or lost."""
        if submit.deadline_seconds is None:
            return None
        error = Late(timeout_message(submit.deadline_seconds))
        return asyncio.get_running_loop().call_later(submit.deadline_seconds, pending.fail, error)

    def _connected(self, replaces_moved: bool = False) -> _Connection:
        if self._is_closed:
            raise Unavailable("this client is closed")
        if self._connection is None or self._connection.is_lost:
            self._lost = [lost for lost in (*self._lost, self._connection) if lost is not None and not lost.is_gone]
            self._connection = _Connection(self._make_transport(), self._progress, self._vocabulary, self._on_lost)
            self._connection.replaces_moved = replaces_moved
        return self._connection

    def _on_lost(self, connection: _Connection, requests: list[PendingRequest], error: Error) -> None:
        """An engine is lost. Requests that can continue go to the next one, in order of arrival."""
        is_last = self._is_closed or connection is not self._connection
        again = [] if is_last else self._survivors(connection, requests, error)
        for pending in requests:
            if pending not in again:
                pending.fail(error)
        has_moved = isinstance(error, EngineMoved)
        if not is_last and (again or has_moved):
            self._go_on(again, has_moved)

    def _survivors(self, connection: _Connection, requests: list[PendingRequest], error: Error) -> list[PendingRequest]:
        is_crash = isinstance(error, Unavailable) and not isinstance(error, EngineMoved)
        cause = connection.cause(requests, error) if is_crash else None
        if cause is not None:
            return self._refuse(cause, [pending for pending in requests if pending is not cause], error)
        at_risk = (connection.accuse(requests) if is_crash else []) or requests
        return [pending for pending in requests if pending not in at_risk or pending.survives(error, self._max_crashes)]

    def _go_on(self, again: list[PendingRequest], has_moved: bool) -> None:
        """With the next engine."""
        try:
            following = self._connected(replaces_moved=has_moved)
        except Exception as failure:  # noqa: BLE001 - out of memory or file descriptors: waiting requests fail with it
            for pending in again:
                pending.fail(
                    failure if isinstance(failure, Error) else Unavailable(f"no other engine could be started: {failure}")
                )
            return
        for pending in again:
            following.adopt(pending)

    # --- requests that end engines

    def _check_refused(self, submit: Submit) -> None:
        if self._refused and time.monotonic() < self._refused.get(submit_digest(submit), -math.inf) + REFUSED_SECONDS:
            raise Broken(ENDED_ENGINES.format(how=""))
        self._offenders.check(group_of(submit.owner))

    def _refuse(self, cause: PendingRequest, others: list[PendingRequest], error: Error) -> list[PendingRequest]:
        """Returns the others that are not refused too: as copies of it, or of a key that has done this too often."""
        self._refused[cause.digest] = time.monotonic()
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        group = group_of(cause.owner)
        if group and not group.startswith(ADDRESS):
            self._offenders.note(group)
        cause.fail(Broken(ENDED_ENGINES.format(how=f" ({error})")))
        left: list[PendingRequest] = []
        for pending in others:
            try:
                self._check_refused(pending.submit)
            except Error as refusal:
                pending.fail(refusal)
            else:
                pending.forgive()
                left.append(pending)
        return left


class _Connection:
    """The connection to one engine."""

    def __init__(
        self,
        transport: EngineTransport,
        progress: Progress | None,
        vocabulary: Callable[[], TokenizerData] | None,
        on_lost: Callable[[_Connection, list[PendingRequest], Error], None],
    ) -> None:
        """`on_lost` is called once, when the engine is lost, with its requests."""
        self.transport, self._progress, self._vocabulary, self._on_lost = transport, progress, vocabulary, on_lost
        self.info: asyncio.Future[Info] = asyncio.get_running_loop().create_future()
        self.info.add_done_callback(_mark_retrieved)
        self.replaces_moved = False
        """It replaces an engine that moved."""
        self.requests: dict[int, PendingRequest] = {}
        self._held: dict[int, PendingRequest] = {}
        """Those of them that this engine has not got yet."""
        self._tried: PendingRequest | None = None
        """A suspect that it got last, as long as it may still end the engine."""
        self._turns, self._last_cancel = 0, -1
        """The engine does what it is told in this order. Until it is known to have come past the last Cancel, that request may be there."""
        self._info_replies: dict[int, asyncio.Future[Info]] = {}
        self._changes: dict[int, asyncio.Future[None]] = {}
        self.is_lost = self._is_closed = self._is_gone = self._has_tokenizer = False
        self._closing: asyncio.Task[None] | None = None
        transport.open(self._receive, self._lost)

    @property
    def is_ready(self) -> bool:
        return not self.is_lost and self.info.done()

    @property
    def is_gone(self) -> bool:
        """Its process has been waited for."""
        return self._is_gone or (self._closing is not None and self._closing.done())

    def adopt(self, pending: PendingRequest) -> None:
        """Submits it now, or when the engine is ready and has done with suspects."""
        self.requests[pending.number] = self._held[pending.number] = pending
        self._submit_held()

    def drop(self, pending: PendingRequest, is_finished: bool) -> None:
        is_held = self._held.pop(pending.number, None) is not None
        if self.requests.pop(pending.number, None) is not None and not (is_finished or is_held) and self.is_ready:
            self._last_cancel = self._next_turn()
            self.transport.send(Cancel(pending.number))
        self._pass(pending)

    def cause(self, requests: list[PendingRequest], error: Error) -> PendingRequest | None:
        """Of a crash: the only request that this engine had, unless it was its first crash."""
        submitted = self._submitted(requests)
        if len(submitted) != 1 or self._last_cancel >= 0:
            return None
        return submitted[0] if submitted[0].is_cause(error) else None

    def accuse(self, requests: list[PendingRequest]) -> list[PendingRequest]:
        """Whoever may have ended this engine is a suspect from now on. None, if it ended before it got any."""
        submitted = self._submitted(requests)
        for pending in submitted:
            pending.suspicion = 2 if pending is self._tried else 1
        return submitted

    def _submitted(self, requests: list[PendingRequest]) -> list[PendingRequest]:
        return [pending for pending in requests if pending.number not in self._held]

    async def fetch_info(self, number: int) -> Info:
        answer: asyncio.Future[Info] = asyncio.get_running_loop().create_future()
        self._info_replies[number] = answer
        self.transport.send(InfoRequest(number))
        try:
            return await answer
        finally:
            self._info_replies.pop(number, None)  # the caller may have been cancelled

    async def change(self, command: AddAdapter | RemoveAdapter) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changes[command.id] = answer
        self.transport.send(command)
        try:
            await answer
        finally:
            self._changes.pop(command.id, None)

    async def close(self) -> None:
        self._is_closed = True
        error = Unavailable("the engine was closed")
        for pending in self.end(error):
            pending.fail(error)
        await self.transport.close()
        if self._closing is not None:
            await self._closing
        self._is_gone = True

    def end(self, error: Error) -> list[PendingRequest]:
        """Fails pending info requests and changes, and returns the unfinished requests."""
        self.is_lost = True
        requests, self.requests = list(self.requests.values()), {}
        for waiting in (self.info, *self._info_replies.values(), *self._changes.values()):
            if not waiting.done():
                waiting.set_exception(error)
                _mark_retrieved(waiting)
        return requests

    def _submit_held(self) -> None:
        """One suspect; all, where there is none."""
        if self._tried is not None or not self.is_ready:
            return
        suspects = [pending for pending in self._held.values() if pending.suspicion]
        if suspects:
            self._tried = min(suspects, key=lambda pending: pending.urgency)
        for pending in [self._tried] if self._tried is not None else list(self._held.values()):
            self._submit(pending)

    def _pass(self, pending: PendingRequest) -> None:
        """It has not ended the engine; if it was being tried, it is the next one's turn."""
        if pending is self._tried:
            self._tried = None
            self._submit_held()

    def _submit(self, pending: PendingRequest) -> None:
        if pending.needs_tokenizer and self._vocabulary is not None and not self._has_tokenizer:
            self.transport.send(self._vocabulary())
            self._has_tokenizer = True
        del self._held[pending.number]
        pending.turn = self._next_turn()
        self.transport.send(pending.next_submit())

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns

    def _take(self, output: SequenceOutput) -> None:
        pending = self.requests.get(output.id)
        if pending is None:  # it was cancelled
            return
        pending.take(output)
        if pending.turn > self._last_cancel:
            self._last_cancel = -1
        if output.finish is not None:  # its outputs may be unread, but it is not replayed
            del self.requests[output.id]
        if pending is self._tried and (pending.has_passed or output.finish is not None):
            pending.suspicion = 0
            self._pass(pending)

    def _receive(self, report: Report) -> None:
        match report:
            case StepOutputs():
                for output in report.outputs:
                    self._take(output)
            case AdapterChanged():
                _settle(self._changes.get(report.id), None)
            case RequestRejected() if report.id in self._changes:
                _settle(self._changes.get(report.id), as_error(report))
            case RequestRejected():
                pending = self.requests.pop(report.id, None)
                if pending is not None:
                    pending.fail(as_error(report))
                    self._pass(pending)
            case InfoReply():
                with suppress(KeyError, asyncio.InvalidStateError):
                    self._info_replies.pop(report.id).set_result(report.info)
            case LoadProgress():
                if self._progress is not None:
                    self._progress(report.done_bytes, report.total_bytes)
            case EngineReady():
                self._became_ready(report.info)
            case EngineFailed():
                self._fail(as_error(report))

    def _became_ready(self, info: Info) -> None:
        if self.info.done():
            return
        self.info.set_result(info)
        self._submit_held()

    def _fail(self, error: Error) -> None:
        if not self.is_lost:
            self._on_lost(self, self.end(error), error)

    def _lost(self, error: Error) -> None:
        if self._is_closed:
            return
        self._closing = asyncio.get_running_loop().create_task(self.transport.close())
        self._fail(error)


def _settle(future: asyncio.Future[None] | None, error: Error | None) -> None:
    if future is None or future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


def _mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Marks the exception as retrieved, so that asyncio does not log it."""
    if future.done() and not future.cancelled():
        future.exception()
