"""A worker: listens for a root that knows the secret, serves one root at a time, and outlives all of them. No torch.

Unauthenticated connections are dropped and have no effect. When a root is lost its ranks are ended and the worker waits for the next one.
SIGINT or SIGTERM ends the worker and everything it started.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from windlass.errors import BadInput
from windlass.runtime.fleet.protocol.channel import HANDSHAKE_SECONDS, Channel, ChannelLost, accept
from windlass.runtime.fleet.protocol.handshake import NotAdmitted
from windlass.runtime.fleet.protocol.messages import FromRoot, FromWorker, Join, Joined, WorkerBusy
from windlass.runtime.fleet.worker.config import WorkerConfig, WorkerLog
from windlass.runtime.fleet.worker.connection_limiter import ConnectionLimiter, RefusalLog
from windlass.runtime.fleet.worker.session import SHUTTING_DOWN, Session

BACKLOG = 128
SECONDS_BETWEEN_LINES = 1.0
SECONDS_AFTER_A_FAILURE = 0.1
OUT_OF_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

HINTS = {
    errno.EADDRINUSE: "; another program uses it, perhaps another worker",
    errno.EADDRNOTAVAIL: "; no interface of this machine has it",
    errno.EACCES: "; take a port above 1023",
}


def listen(host: str, port: int) -> socket.socket:
    """Binds one address; 0.0.0.0 is every interface."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadInput(f"--listen {host}:{port}: {error.strerror or error}") from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        raise BadInput(f"--listen {host}:{port}: {error.strerror}{HINTS.get(error.errno or 0, '')}") from None
    return listening


@dataclass
class _Serving:
    """The current root."""

    root: bytes
    who: str
    since: str
    task: asyncio.Task[None]

    @property
    def reason(self) -> str:
        return f"busy with root {self.who} since {self.since}"


class Worker:
    def __init__(self, listening: socket.socket, secret: bytes, config: WorkerConfig, log: WorkerLog, name: str = "") -> None:
        self._listening, self._secret, self._config, self._log = listening, secret, config, log
        self._name = name or socket.gethostname()
        self._limiter, self._refusals = ConnectionLimiter(), RefusalLog()
        self._serving: _Serving | None = None
        self._authenticating: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until a signal, or until it is cancelled."""
        loop, ending = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError, NotImplementedError):  # not in the main thread: the caller cancels
                loop.add_signal_handler(number, ending.set)
        tasks = [asyncio.create_task(work) for work in (self._accept(), self._log_refusals())]
        try:
            await asyncio.wait([asyncio.create_task(ending.wait()), *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()  # raises: a bug of our own
        finally:
            await self._close(tasks)

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        self._listening.close()
        tasks = [*tasks, *self._authenticating, *([self._serving.task] if self._serving is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- connections

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._serving is not None:
                await asyncio.sleep(self._limiter.pause_seconds(time.monotonic()))
            try:
                connection, address = await loop.sock_accept(self._listening)
            except OSError as error:
                if error.errno in OUT_OF_RESOURCES:
                    self._refusals.add("everybody", str(error.strerror))
                    await asyncio.sleep(SECONDS_AFTER_A_FAILURE)
                continue
            task = asyncio.create_task(self._authenticate(connection, str(address[0])))
            self._authenticating.add(task)
            task.add_done_callback(self._authenticating.discard)

    async def _authenticate(self, connection: socket.socket, address: str) -> None:
        me = asyncio.current_task()
        assert me is not None
        number = self._limiter.enter(address, me.cancel)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                channel = await accept(connection, self._secret)
                join = await self._receive_join(channel)
        except TimeoutError:
            self._refusals.add(address, f"not authenticated within {HANDSHAKE_SECONDS:g} s")
        except asyncio.CancelledError:
            self._refusals.add(address, "too many unauthenticated connections")
        except (NotAdmitted, ChannelLost, OSError, EOFError) as error:
            self._refusals.add(address, str(error))
        except Exception as error:  # noqa: BLE001 - the outermost edge: a stranger must not affect others
            self._refusals.add(address, f"{type(error).__name__}: {error}")
        else:
            self._limiter.leave(number)
            await self._take_over(channel, join)
        finally:
            self._limiter.leave(number)

    async def _receive_join(self, channel: Channel[FromWorker, FromRoot]) -> Join:
        try:
            join = await channel.receive()
            if not isinstance(join, Join):
                raise ChannelLost("the first message of a root must be Join")
        except BaseException:
            channel.close()
            raise
        return join

    async def _log_refusals(self) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LINES)
            if line := self._refusals.summary():
                self._log.line(line)

    # --- one root at a time

    async def _take_over(self, channel: Channel[FromWorker, FromRoot], join: Join) -> None:
        """A root that reconnects before its loss was noticed replaces its old connection."""
        while (before := self._serving) is not None:
            if before.root != join.root:
                self._log.line(f"refused root {join.name} ({channel.address}): {before.reason}")
                channel.post(WorkerBusy(before.reason))
                channel.close()
                return
            before.task.cancel()
            await asyncio.wait([before.task])
        who = f"{join.name} ({channel.address})"
        task = asyncio.create_task(self._serve(channel, who))
        self._serving = _Serving(join.root, who, time.strftime("%H:%M:%S"), task)

    async def _serve(self, channel: Channel[FromWorker, FromRoot], who: str) -> None:
        self._log.line(f"root {who} joined")
        why = SHUTTING_DOWN
        try:
            channel.post(Joined(self._name))
            why = await Session(channel, self._config, self._log, channel.local_address).run()
        finally:
            channel.close()
            self._serving = None
            self._log.line(f"root {who} {f'is lost: {why}' if why else 'disconnected'}; waiting for a root")
