"""One machine of a fleet as the root sees it: its channel, its probe, and requests with one reply each. On an event loop."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, TypeVar

from windlass.core.ranks.address import worker_address
from windlass.core.ranks.epoch import Node
from windlass.runtime.fleet.protocol import messages
from windlass.runtime.fleet.protocol.channel import Channel, ChannelLost, MessageChannel, dial
from windlass.runtime.fleet.protocol.messages import FromRoot, FromWorker

ROOT = "root"
"""Name of the root's own machine."""
ANSWER_SECONDS = 10.0
PROBE_SECONDS = 60.0
"""Memory bandwidth is measured once per boot; a busy machine takes longer."""

Answer = TypeVar("Answer")


class WorkerRefused(Exception):
    """A worker that answers and refuses: it is busy with another root."""


class Member:
    def __init__(self, name: str, channel: MessageChannel[FromRoot, FromWorker], root_address: str = "") -> None:
        """`root_address`: of the root, as the worker sees it."""
        self.name, self.channel, self.root_address = name, channel, root_address
        self.probe = messages.ProbeAnswer("", "", 1, 0, 0.0, "cpu")
        self._pending: dict[object, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()

    @property
    def is_root(self) -> bool:
        return self.name == ROOT

    def node(self, num_ranks: int) -> Node:
        probe = self.probe
        return Node(
            name=self.name,
            memory_bytes=probe.free_bytes,
            bandwidth=probe.bandwidth,
            address=probe.address,
            cores=probe.num_cores,
            num_ranks=num_ranks,
            gpus=probe.gpus,
        )

    async def measure(self) -> messages.ProbeAnswer:
        """Probes its free memory and devices now."""
        self.probe = await self._ask(messages.ProbeRequest(), messages.ProbeAnswer, PROBE_SECONDS)
        return self.probe

    async def heartbeats(self) -> list[messages.RankReport]:
        number = next(self._numbers)
        found: messages.Heartbeats = await self._ask(messages.HeartbeatsRequest(number), ("heartbeats", number))
        return found.ranks

    def take_answer(self, message: FromWorker) -> bool:
        """Whether the message was the reply to a request."""
        key = ("heartbeats", message.id) if isinstance(message, messages.Heartbeats) else type(message)
        waiting = self._pending.pop(key, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
        return waiting is not None

    async def _ask(self, question: FromRoot, key: object, seconds: float = ANSWER_SECONDS) -> Any:
        waiting = self._pending.setdefault(key, asyncio.get_running_loop().create_future())
        self.channel.post(question)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(waiting)
        except TimeoutError:
            raise ChannelLost(f"{self.name} did not answer within {seconds:g} s") from None


async def join(name: str, secret: bytes, root: bytes, this_host: str) -> Member:
    """Connects to a worker. Raises ChannelLost, NotAdmitted or WorkerRefused."""
    host, port = worker_address(name)
    channel: Channel[FromRoot, FromWorker] = await dial(host, port, secret)
    try:
        channel.post(messages.Join(root, this_host))
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await channel.receive()
        if isinstance(answer, messages.WorkerBusy):
            raise WorkerRefused(f"{name} is {answer.reason}")
        if not isinstance(answer, messages.Joined):
            raise ChannelLost(f"{name} answered the join request with another message")
    except TimeoutError:
        channel.close()
        raise ChannelLost(f"{name} did not answer the join request within {ANSWER_SECONDS:g} s") from None
    except BaseException:
        channel.close()
        raise
    return Member(name, channel, channel.local_address)
