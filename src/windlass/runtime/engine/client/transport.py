"""Transports to an engine: commands go in, reports come out, until it is lost. ProcessTransport runs the engine in a process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from typing import IO, TYPE_CHECKING, Any, Protocol

import msgspec

from windlass.core.client import Unavailable
from windlass.core.constants import DECODE_ERRORS
from windlass.core.launch import RankJob
from windlass.core.ranks.frames import BadFrame
from windlass.errors import Error
from windlass.runtime.engine.client.replay import EngineKilled
from windlass.runtime.engine.protocol import Command, MessageReader, Report, encode_frame
from windlass.runtime.engine.timeline import mark
from windlass.runtime.machine.exit_status import describe_exit, last_line

if TYPE_CHECKING:
    pass

SECONDS_TO_END = 10.0
FROM_OUTSIDE = frozenset((-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP))
"""Exit codes of a process that somebody ended."""

Receive = Callable[[Report], None]
Lost = Callable[[Error], None]


class EngineTransport(Protocol):
    """`receive` and `lost` are called on the event loop that `open` was called on; nothing comes after `lost`."""

    def open(self, receive: Receive, lost: Lost) -> None: ...

    def send(self, command: Command) -> None: ...

    def kill(self) -> None:
        """Ends an engine that may be stuck. `close` must follow."""
        ...

    async def close(self) -> None:
        """Returns when the engine has ended. May be called at any time, and twice."""
        ...


class EngineProcess:
    """One that was started: it imports what it needs, then waits for its job on standard input. It ends with this process."""

    def __init__(self, inherited: Sequence[int] = ()) -> None:
        """Call it in the thread of the event loop: with PR_SET_PDEATHSIG a process ends with the thread that started it."""
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self.process = subprocess.Popen(
                # -P: the current directory is not on sys.path.
                [sys.executable, "-P", "-m", "windlass.runtime.engine.process", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=self.output,
                stderr=self.output,
                pass_fds=[theirs.fileno(), *inherited],
                process_group=0,
            )
        mark("engine process started")

    def give(self, job: RankJob) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(msgspec.msgpack.encode(job))

    def end(self) -> None:
        """One that got no job."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.connection.close()
        self.process.wait()
        self.output.close()


_ahead: list[EngineProcess] = []


@contextlib.contextmanager
def started_ahead() -> Generator[None]:
    """For a command that will soon open a model, in this thread: the first ProcessTransport within finds its process started, its imports done."""
    _ahead.append(EngineProcess())
    try:
        yield
    finally:
        while _ahead:
            _ahead.pop().end()


class ProcessTransport:
    """The engine process has its own process group, so Ctrl-C does not reach it; it ends with this process."""

    def __init__(self, job: RankJob, supervised: socket.socket | None = None) -> None:
        """`supervised`: rank 0's end of the socket to its supervisor, whose descriptor is in the job; closed here once inherited."""
        self._job, self._supervised = job, supervised
        self._process: subprocess.Popen[bytes] | None = None
        self._stream: asyncio.Transport | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._unsent: list[bytes] = []
        self._is_closed = False
        self._output: IO[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def open(self, receive: Receive, lost: Lost) -> None:
        if self._supervised is None and _ahead:
            started = _ahead.pop()
        else:
            started = EngineProcess([] if self._supervised is None else [self._supervised.fileno()])
        self._process, self._output = started.process, started.output
        if self._supervised is not None:
            self._supervised.close()
        started.give(self._job)
        self._connecting = asyncio.get_running_loop().create_task(self._connect(started.connection, receive, lost))

    async def _connect(self, ours: socket.socket, receive: Receive, lost: Lost) -> None:
        loop = asyncio.get_running_loop()
        stream, _ = await loop.create_unix_connection(lambda: _ReportReader(receive, lambda: self._on_close(lost)), sock=ours)
        self._stream = stream
        for data in self._unsent:
            stream.write(data)
        self._unsent.clear()

    def send(self, command: Command) -> None:
        if self._stream is None:
            self._unsent.append(encode_frame(command))
        elif not self._stream.is_closing():
            self._stream.write(encode_frame(command))

    def kill(self) -> None:
        self._is_closed = True
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        self._is_closed = True
        if self._supervised is not None:
            self._supervised.close()
        try:
            await self._end()
        finally:  # also where it is cancelled
            if self._output is not None:
                self._output.close()

    async def _end(self) -> None:
        if self._connecting is not None:
            await self._connecting
        if self._stream is not None:
            self._stream.abort()
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)

    def _on_close(self, lost: Lost) -> None:
        """The socket was closed: the process has exited or is about to."""
        if not self._is_closed:
            self._reporting = asyncio.get_running_loop().create_task(self._report(lost))

    async def _report(self, lost: Lost) -> None:
        lost(await self._why_lost())

    async def _why_lost(self) -> Error:
        assert self._process is not None
        try:
            status = await asyncio.to_thread(self._process.wait, SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            return Unavailable("the engine process closed its connection; retry to restart it")
        last = "" if self._output is None or self._output.closed else last_line(self._output.fileno())
        kind = EngineKilled if status in FROM_OUTSIDE else Unavailable
        return kind(f"the engine process {describe_exit(status)}{f': {last}' if last else ''}; retry to restart it")


class _ReportReader(asyncio.Protocol):
    def __init__(self, receive: Receive, lost: Callable[[], None]) -> None:
        self._receive, self._lost, self._frames = receive, lost, MessageReader()
        self._stream: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stream = transport

    def data_received(self, data: bytes) -> None:
        try:
            for report in self._frames.reports(data):
                self._receive(report)
        except (BadFrame, *DECODE_ERRORS):  # not our protocol
            self._stream.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()
