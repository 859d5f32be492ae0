"""Many requests at once over one way to an engine: starts it when it is needed, tells answers apart, notices its end. No torch.

Requests that an engine had when it was lost are asked again of the next one, which goes on after the tokens that were given out: who
waits sees a pause. As often as engines move; of engines that break only so many, since a request may be what breaks them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from windlass.core.client import Late, Unavailable
from windlass.core.request import Info
from windlass.engine.client.replay import EngineMoved, PendingRequest
from windlass.engine.client.transport import EngineTransport
from windlass.engine.protocol import (
    Cancel,
    EngineFailed,
    EngineReady,
    InfoReply,
    InfoRequest,
    LoadProgress,
    Report,
    RequestRejected,
    SequenceOutput,
    StepOutputs,
    Submit,
    TokenizerData,
    as_error,
    timeout_message,
)
from windlass.errors import Error

Progress = Callable[[int, int], None]
"""Bytes loaded, and of how many."""


class EngineRequests:
    def __init__(
        self,
        make_transport: Callable[[], EngineTransport],
        progress: Progress | None = None,
        vocabulary: Callable[[], TokenizerData] | None = None,
        max_crashes: int = 0,
    ) -> None:
        """`vocabulary` is sent to an engine once, before the first request with a grammar. `max_crashes`: engines that may break under
        a request before it fails too."""
        self._make_transport, self._progress, self._vocabulary = make_transport, progress, vocabulary
        self._max_crashes = max_crashes
        self._connection: _Connection | None = None
        self._lost: list[_Connection] = []
        self._numbers = 0
        self._is_closed = False

    @property
    def is_alive(self) -> bool:
        """Whether there is an engine that is ready, or one that moves and will be."""
        return self._connection is not None and (self._connection.is_ready or self.is_moving)

    @property
    def is_moving(self) -> bool:
        """Requests wait for an engine that is made elsewhere."""
        connection = self._connection
        return connection is not None and connection.follows and not connection.is_lost and not connection.info.done()

    async def ready(self) -> Info:
        """Starts the engine if there is none, and waits for it. Giving up waiting does not stop it from being loaded."""
        while True:
            with suppress(EngineMoved):
                return await asyncio.shield(self._connected().info)

    async def outputs(self, submit: Submit) -> AsyncGenerator[list[SequenceOutput], None]:
        """What came for a request since it was last asked; `submit.id` is chosen here. Ending early cancels it."""
        await self.ready()
        self._numbers += 1
        pending, finished = PendingRequest(self._numbers, submit), False
        timer = self._deadline(submit, pending)
        try:
            self._connected().adopt(pending)
            while not finished:
                found = _raised([await pending.arrived.get(), *_waiting(pending.arrived)])
                finished = found[-1].finish is not None
                yield found
        finally:
            if timer is not None:
                timer.cancel()
            if self._connection is not None:
                self._connection.drop(pending, is_finished=finished)

    async def info(self) -> Info:
        """With statistics of now."""
        while True:
            with suppress(EngineMoved):
                await self.ready()
                return await self._connected().asked(self._next_number())

    async def restart(self) -> None:
        """Ends an engine that is there; the next one goes on with what it was asked, or with the next request."""
        connection = self._connection
        if connection is None or connection.is_lost:
            return
        connection.transport.kill()
        error = Unavailable("the engine was stuck and is started anew; ask again")
        self._over(connection, connection.end(error), error)
        await connection.close()

    async def close(self) -> None:
        self._is_closed = True
        connections = [*self._lost, *([self._connection] if self._connection is not None else [])]
        self._connection, self._lost = None, []
        for connection in connections:
            await connection.close()

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    @staticmethod
    def _deadline(submit: Submit, pending: PendingRequest) -> asyncio.TimerHandle | None:
        """The engine ends late requests itself; this is for one that is in the middle of a long step, stuck, or lost."""
        if submit.deadline_seconds is None:
            return None
        error = Late(timeout_message(submit.deadline_seconds))
        return asyncio.get_running_loop().call_later(submit.deadline_seconds, pending.fail, error)

    def _connected(self, follows: bool = False) -> _Connection:
        if self._is_closed:
            raise Unavailable("this client is closed")
        if self._connection is None or self._connection.is_lost:
            self._lost = [lost for lost in (*self._lost, self._connection) if lost is not None and not lost.is_gone]
            self._connection = _Connection(self._make_transport(), self._progress, self._vocabulary, self._over)
            self._connection.follows = follows
        return self._connection

    def _over(self, connection: _Connection, requests: list[PendingRequest], error: Error) -> None:
        """An engine is gone. Those who can go on are handed to the next one, in the order in which they came."""
        again = [pending for pending in requests if not self._is_closed and pending.survives(error, self._max_crashes)]
        for pending in requests:
            if pending not in again:
                pending.fail(error)
        has_moved = isinstance(error, EngineMoved)
        if connection is not self._connection or self._is_closed or not (again or has_moved):
            return
        try:
            following = self._connected(follows=has_moved)
        except Exception as none:  # noqa: BLE001 - no memory for a process, too many files: whoever waits is told, whatever it is
            for pending in again:
                pending.fail(none if isinstance(none, Error) else Unavailable(f"no other engine could be started: {none}"))
            return
        for pending in again:
            following.adopt(pending)


class _Connection:
    """One life of an engine."""

    def __init__(
        self,
        transport: EngineTransport,
        progress: Progress | None,
        vocabulary: Callable[[], TokenizerData] | None,
        over: Callable[[_Connection, list[PendingRequest], Error], None],
    ) -> None:
        """`over` is told once, when it is lost, with the requests it had."""
        self.transport, self._progress, self._vocabulary, self._over = transport, progress, vocabulary, over
        self.info: asyncio.Future[Info] = asyncio.get_running_loop().create_future()
        self.info.add_done_callback(_look_at)
        self.follows = False
        """Another that has moved here."""
        self.requests: dict[int, PendingRequest] = {}
        self._questions: dict[int, asyncio.Future[Info]] = {}
        self.is_lost = self._is_closed = self._is_gone = self._knows_words = False
        self._closing: asyncio.Task[None] | None = None
        transport.open(self._receive, self._lost)

    @property
    def is_ready(self) -> bool:
        return not self.is_lost and self.info.done()

    @property
    def is_gone(self) -> bool:
        """Nothing of it is left."""
        return self._is_gone or (self._closing is not None and self._closing.done())

    def adopt(self, pending: PendingRequest) -> None:
        """Asked at once, or when the engine is ready."""
        self.requests[pending.number] = pending
        if self.is_ready:
            self._ask(pending)

    def drop(self, pending: PendingRequest, is_finished: bool) -> None:
        if self.requests.pop(pending.number, None) is not None and not is_finished and self.is_ready:
            self.transport.send(Cancel(pending.number))

    async def asked(self, number: int) -> Info:
        answer: asyncio.Future[Info] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        self.transport.send(InfoRequest(number))
        try:
            return await answer
        finally:
            self._questions.pop(number, None)  # whoever gave up waiting wants no answer any more

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
        """Nothing more will come: whoever asked about it is told, and what it was asked is handed out."""
        self.is_lost = True
        requests, self.requests = list(self.requests.values()), {}
        for waiting in (self.info, *self._questions.values()):
            if not waiting.done():
                waiting.set_exception(error)
                _look_at(waiting)
        return requests

    def _ask(self, pending: PendingRequest) -> None:
        if pending.needs_words and self._vocabulary is not None and not self._knows_words:
            self.transport.send(self._vocabulary())
            self._knows_words = True
        self.transport.send(pending.asked())

    def _receive(self, report: Report) -> None:
        match report:
            case StepOutputs():
                for output in report.outputs:
                    pending = self.requests.get(output.id)
                    if pending is not None:  # otherwise nobody waits for it any more
                        pending.take(output)
                        if output.finish is not None:  # perhaps not read yet, but nothing for the next engine
                            del self.requests[output.id]
            case RequestRejected():
                pending = self.requests.pop(report.id, None)
                if pending is not None:
                    pending.fail(as_error(report))
            case InfoReply():
                with suppress(KeyError, asyncio.InvalidStateError):
                    self._questions.pop(report.id).set_result(report.info)
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
        for pending in self.requests.values():
            self._ask(pending)

    def _fail(self, error: Error) -> None:
        if not self.is_lost:
            self._over(self, self.end(error), error)

    def _lost(self, error: Error) -> None:
        if self._is_closed:
            return
        self._closing = asyncio.get_running_loop().create_task(self.transport.close())
        self._fail(error)


def _waiting(arrived: asyncio.Queue[SequenceOutput | Error]) -> list[SequenceOutput | Error]:
    return [arrived.get_nowait() for _ in range(arrived.qsize())]


def _raised(found: list[SequenceOutput | Error]) -> list[SequenceOutput]:
    """Tokens that came before an error are of no more use."""
    outputs: list[SequenceOutput] = []
    for what in found:
        if isinstance(what, Error):
            raise what
        outputs.append(what)
    return outputs


def _look_at(future: asyncio.Future[Info]) -> None:
    """An error that nobody waits for is no reason to complain when it is collected."""
    if future.done() and not future.cancelled():
        future.exception()
