"""Many requests at once over one way to an engine: starts it when it is needed, tells answers apart, notices its end. No torch.

An engine that was lost fails the requests that it had; the next request starts another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

import msgspec

from windlass.core.client import Late, Unavailable
from windlass.core.request import Info
from windlass.engine.port import Port
from windlass.engine.protocol import (
    AskInfo,
    Cancel,
    Failed,
    Loading,
    Output,
    Ready,
    Refused,
    Report,
    Stepped,
    Submit,
    Told,
    Vocabulary,
    as_error,
    late_words,
)
from windlass.errors import Error

Progress = Callable[[int, int], None]
"""Bytes loaded, and of how many."""


class Calls:
    def __init__(
        self,
        make_port: Callable[[], Port],
        progress: Progress | None = None,
        vocabulary: Callable[[], Vocabulary] | None = None,
    ) -> None:
        """`vocabulary` is sent to an engine once, before the first request with a grammar."""
        self._make_port, self._progress, self._vocabulary = make_port, progress, vocabulary
        self._connection: _Connection | None = None
        self._lost: list[_Connection] = []
        self._numbers = 0
        self._is_closed = False

    @property
    def is_alive(self) -> bool:
        """Whether there is an engine that is ready."""
        return self._connection is not None and self._connection.is_ready

    async def ready(self) -> Info:
        """Starts the engine if there is none, and waits for it. Giving up waiting does not stop it from being loaded."""
        return await asyncio.shield(self._connected().info)

    async def outputs(self, submit: Submit) -> AsyncGenerator[list[Output], None]:
        """What came for a request since it was last asked; `submit.id` is chosen here. Ending early cancels it."""
        connection = self._connected()
        await asyncio.shield(connection.info)
        self._numbers += 1
        number = self._numbers
        arrived: asyncio.Queue[Output | Error] = asyncio.Queue()
        finished, timer = False, None
        try:
            self._teach(connection, submit)
            connection.calls[number] = arrived
            connection.port.send(msgspec.structs.replace(submit, id=number))
            timer = self._deadline(submit, arrived)
            while not finished:
                found = _raised([await arrived.get(), *_waiting(arrived)])
                finished = found[-1].finish is not None
                yield found
        finally:
            if timer is not None:
                timer.cancel()
            if connection.calls.pop(number, None) is not None and not finished:
                connection.port.send(Cancel(number))

    async def info(self) -> Info:
        """With statistics of now."""
        connection = self._connected()
        await asyncio.shield(connection.info)
        self._numbers += 1
        answer: asyncio.Future[Info] = asyncio.get_running_loop().create_future()
        number = self._numbers
        connection.questions[number] = answer
        connection.port.send(AskInfo(number))
        try:
            return await answer
        finally:
            connection.questions.pop(number, None)  # whoever gave up waiting wants no answer any more

    async def restart(self) -> None:
        """Ends an engine that is there, and what it was asked, with Unavailable; the next request starts another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.port.kill()
            await connection.close(Unavailable("the engine was stuck and is started anew; ask again"))

    async def close(self) -> None:
        self._is_closed = True
        connections = [*self._lost, *([self._connection] if self._connection is not None else [])]
        self._connection, self._lost = None, []
        for connection in connections:
            await connection.close()

    @staticmethod
    def _deadline(submit: Submit, arrived: asyncio.Queue[Output | Error]) -> asyncio.TimerHandle | None:
        """The engine ends late requests itself; this is for one that is in the middle of a long step, or stuck."""
        if submit.deadline_seconds is None:
            return None
        error = Late(late_words(submit.deadline_seconds))
        return asyncio.get_running_loop().call_later(submit.deadline_seconds, arrived.put_nowait, error)

    def _teach(self, connection: _Connection, submit: Submit) -> None:
        if submit.grammar and self._vocabulary is not None and not connection.knows_words:
            connection.port.send(self._vocabulary())
            connection.knows_words = True

    def _connected(self) -> _Connection:
        if self._is_closed:
            raise Unavailable("this client is closed")
        if self._connection is None or self._connection.is_lost:
            self._lost = [lost for lost in (*self._lost, self._connection) if lost is not None and not lost.is_gone]
            self._connection = _Connection(self._make_port(), self._progress)
        return self._connection


class _Connection:
    """One life of an engine."""

    def __init__(self, port: Port, progress: Progress | None) -> None:
        self.port, self._progress = port, progress
        self.info: asyncio.Future[Info] = asyncio.get_running_loop().create_future()
        self.info.add_done_callback(_look_at)
        self.calls: dict[int, asyncio.Queue[Output | Error]] = {}
        self.questions: dict[int, asyncio.Future[Info]] = {}
        self.is_lost = self._is_closed = self.knows_words = False
        self._closing: asyncio.Task[None] | None = None
        port.open(self._receive, self._lost)

    @property
    def is_ready(self) -> bool:
        return not self.is_lost and self.info.done()

    @property
    def is_gone(self) -> bool:
        """Lost, and nothing of it left."""
        return self._closing is not None and self._closing.done()

    async def close(self, error: Error | None = None) -> None:
        self._is_closed = True
        self._fail(error or Unavailable("the engine was closed"))
        await self.port.close()
        if self._closing is not None:
            await self._closing

    def _fail(self, error: Error) -> None:
        """Everybody who waits is told; nothing more will come."""
        self.is_lost = True
        for arrived in self.calls.values():
            arrived.put_nowait(error)
        self.calls.clear()
        for waiting in (self.info, *self.questions.values()):
            if not waiting.done():
                waiting.set_exception(error)
                _look_at(waiting)

    def _receive(self, report: Report) -> None:
        match report:
            case Stepped():
                for output in report.outputs:
                    self._arrived(output.id, output)
            case Refused():
                self._arrived(report.id, as_error(report))
            case Told():
                with suppress(KeyError, asyncio.InvalidStateError):
                    self.questions.pop(report.id).set_result(report.info)
            case Loading():
                if self._progress is not None:
                    self._progress(report.done_bytes, report.total_bytes)
            case Ready():
                if not self.info.done():
                    self.info.set_result(report.info)
            case Failed():
                self._fail(as_error(report))

    def _arrived(self, number: int, what: Output | Error) -> None:
        arrived = self.calls.get(number)
        if arrived is not None:  # otherwise nobody waits for it any more
            arrived.put_nowait(what)

    def _lost(self, error: Error) -> None:
        if self._is_closed:
            return
        self._fail(error)
        self._closing = asyncio.get_running_loop().create_task(self.port.close())


def _waiting(arrived: asyncio.Queue[Output | Error]) -> list[Output | Error]:
    return [arrived.get_nowait() for _ in range(arrived.qsize())]


def _raised(found: list[Output | Error]) -> list[Output]:
    """Tokens that came before an error are of no more use."""
    outputs: list[Output] = []
    for what in found:
        if isinstance(what, Error):
            raise what
        outputs.append(what)
    return outputs


def _look_at(future: asyncio.Future[Info]) -> None:
    """An error that nobody waits for is no reason to complain when it is collected."""
    if future.done() and not future.cancelled():
        future.exception()
