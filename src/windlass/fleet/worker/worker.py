"""A worker: waits at a port for a root that knows the secret, serves one at a time, and outlives all of them. No torch.

Whatever comes to the port that is not a root's is dropped and has no effect; whatever happens to a root, its ranks end and the worker waits
for the next. It ends when it is told to, by SIGINT or SIGTERM, and then leaves nothing behind.
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
from windlass.fleet.protocol.channel import HANDSHAKE_SECONDS, Channel, ChannelLost, accept
from windlass.fleet.protocol.handshake import NotAdmitted
from windlass.fleet.protocol.messages import FromRoot, FromWorker, Join, Joined, WorkerBusy
from windlass.fleet.worker.config import WorkerConfig, WorkerLog
from windlass.fleet.worker.connection_limiter import ConnectionLimiter, RefusalLog
from windlass.fleet.worker.session import TOLD_TO_END, Session

BACKLOG = 128
SECONDS_BETWEEN_LINES = 1.0
SECONDS_AFTER_A_FAILURE = 0.1
NOT_A_STRANGERS_FAULT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

HINTS = {
    errno.EADDRINUSE: "; another program has it, perhaps another worker",
    errno.EADDRNOTAVAIL: "; no interface of this machine has it",
    errno.EACCES: "; take a port above 1023",
}


def listen(host: str, port: int) -> socket.socket:
    """One address, as it was named; 0.0.0.0 is every interface."""
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
    """The root of now."""

    root: bytes
    who: str
    since: str
    task: asyncio.Task[None]

    @property
    def reason(self) -> str:
        return f"busy with the job of {self.who} since {self.since}"


class Worker:
    def __init__(self, listening: socket.socket, secret: bytes, config: WorkerConfig, log: WorkerLog, name: str = "") -> None:
        self._listening, self._secret, self._config, self._log = listening, secret, config, log
        self._name = name or socket.gethostname()
        self._gate, self._refusals = ConnectionLimiter(), RefusalLog()
        self._serving: _Serving | None = None
        self._meeting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until a signal, or until it is cancelled."""
        loop, ending = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            with suppress(ValueError, NotImplementedError):  # not in the main thread: then whoever started it cancels
                loop.add_signal_handler(number, ending.set)
        doing = [asyncio.create_task(work) for work in (self._answer(), self._tell_of_refusals())]
        try:
            await asyncio.wait([asyncio.create_task(ending.wait()), *doing], return_when=asyncio.FIRST_COMPLETED)
            for task in doing:
                if task.done():
                    task.result()  # a mistake of our own; better said than gone on with
        finally:
            await self._close(doing)

    async def _close(self, doing: list[asyncio.Task[None]]) -> None:
        self._listening.close()
        tasks = [*doing, *self._meeting, *([self._serving.task] if self._serving is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --- the door

    async def _answer(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self._serving is not None:
                await asyncio.sleep(self._gate.pause_seconds(time.monotonic()))
            try:
                connection, address = await loop.sock_accept(self._listening)
            except OSError as error:
                if error.errno in NOT_A_STRANGERS_FAULT:
                    self._refusals.add("everybody", str(error.strerror))
                    await asyncio.sleep(SECONDS_AFTER_A_FAILURE)
                continue
            task = asyncio.create_task(self._meet(connection, str(address[0])))
            self._meeting.add(task)
            task.add_done_callback(self._meeting.discard)

    async def _meet(self, connection: socket.socket, address: str) -> None:
        me = asyncio.current_task()
        assert me is not None
        number = self._gate.enter(address, me.cancel)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                channel = await accept(connection, self._secret)
                join = await self._first_word(channel)
        except TimeoutError:
            self._refusals.add(address, f"it proved nothing within {HANDSHAKE_SECONDS:g} s")
        except asyncio.CancelledError:
            self._refusals.add(address, "too many that had proved nothing yet")
        except (NotAdmitted, ChannelLost, OSError, EOFError) as error:
            self._refusals.add(address, str(error))
        except Exception as error:  # noqa: BLE001 - the outermost edge: whatever a stranger found, nobody else is to notice
            self._refusals.add(address, f"{type(error).__name__}: {error}")
        else:
            self._gate.leave(number)
            await self._welcome(channel, join)
        finally:
            self._gate.leave(number)

    async def _first_word(self, channel: Channel[FromWorker, FromRoot]) -> Join:
        try:
            join = await channel.receive()
            if not isinstance(join, Join):
                raise ChannelLost("the first word of a root is who it is")
        except BaseException:
            channel.close()
            raise
        return join

    async def _tell_of_refusals(self) -> None:
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LINES)
            if line := self._refusals.summary():
                self._log.line(line)

    # --- one root at a time

    async def _welcome(self, channel: Channel[FromWorker, FromRoot], join: Join) -> None:
        """A root that comes back before it was missed takes its own place."""
        while (before := self._serving) is not None:
            if before.root != join.root:
                self._log.line(f"another root, {join.name} ({channel.address}), was told: {before.reason}")
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
        why = TOLD_TO_END
        try:
            channel.post(Joined(self._name))
            why = await Session(channel, self._config, self._log, channel.own_address).run()
        finally:
            channel.close()
            self._serving = None
            self._log.line(f"root {who} {f'is gone: {why}' if why else 'said goodbye'}; waiting")
