"""The machines of a fleet as the root sees them: a connection to every worker, made again whenever it is lost. On an event loop."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable, Sequence

from windlass.runtime.fleet.protocol import messages
from windlass.runtime.fleet.protocol.channel import ChannelLost, keep_alive
from windlass.runtime.fleet.protocol.handshake import NotAdmitted
from windlass.runtime.fleet.protocol.messages import FromWorker
from windlass.runtime.fleet.root.events import Event, WorkerJoined, WorkerLost
from windlass.runtime.fleet.root.loopback import LoopbackMachine
from windlass.runtime.fleet.root.member import ROOT, Member, WorkerRefused, join

SECONDS_BETWEEN_DIALS, SECONDS_AFTER_REFUSAL = 1.0, 5.0
ROOT_ID_BYTES = 16


class WorkerConnections:
    """`on_event`: a worker joined or was lost; `on_message`: what a member sent that answers no question."""

    def __init__(
        self,
        names: Sequence[str],
        secret: bytes,
        on_event: Callable[[Event], None],
        on_message: Callable[[Member, FromWorker], None],
    ) -> None:
        self.members: dict[str, Member] = {}
        """Those that are connected, the root's own machine included."""
        self._names, self._secret = tuple(names), secret
        self._on_event, self._on_message = on_event, on_message
        self._id, self._host = secrets.token_bytes(ROOT_ID_BYTES), socket.gethostname()
        self._loopback: LoopbackMachine | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_open(self) -> bool:
        return self._loopback is not None

    def open(self, device: str) -> None:
        """On the running event loop. `device`: of the root's own machine."""
        self._loopback = LoopbackMachine(device)
        local = self.members[ROOT] = Member(ROOT, self._loopback.channel)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._listen(local))]
        self._tasks += [loop.create_task(self._keep_connected(name)) for name in self._names]

    def say_goodbye(self) -> None:
        for member in self.members.values():
            member.channel.post(messages.Goodbye("the root is shutting down"))

    async def disconnect(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Ends the ranks of this machine. `disconnect` comes first."""
        if self._loopback is not None:
            await self._loopback.close()

    async def _keep_connected(self, name: str) -> None:
        while True:
            pause, refused = SECONDS_BETWEEN_DIALS, False
            try:
                member = await join(name, self._secret, self._id, self._host)
                reason = await self._serve(member)
            except (NotAdmitted, WorkerRefused) as error:
                reason, refused, pause = str(error), True, SECONDS_AFTER_REFUSAL
            except ChannelLost as error:
                reason = str(error)
            self._on_event(WorkerLost(name=name, reason=reason, is_refused=refused))
            await asyncio.sleep(pause)

    async def _serve(self, member: Member) -> str:
        """Until it is lost; returns why."""
        tasks = [asyncio.ensure_future(work) for work in (self._listen(member), keep_alive(member.channel))]
        probing = asyncio.ensure_future(member.measure())
        try:
            await asyncio.wait([probing, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if probing.done():
                probing.result()
                self.members[member.name] = member
                self._on_event(WorkerJoined(name=member.name))
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(str(task.exception() or "it said goodbye") for task in tasks if task.done())
        finally:
            self.members.pop(member.name, None)
            for task in (probing, *tasks):
                task.cancel()
            await asyncio.gather(probing, *tasks, return_exceptions=True)
            member.channel.close()

    async def _listen(self, member: Member) -> None:
        while not isinstance(message := await member.channel.receive(), messages.Goodbye):
            if not member.take_answer(message):
                self._on_message(member, message)
