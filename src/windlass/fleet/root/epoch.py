"""One epoch: weights brought to where they are needed, ranks started everywhere, the first of them here, and all of them ended. On an event loop.

What an epoch is made of (layout, shares, stages) is a plan's; whether it should go on is somebody else's to decide.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from windlass.core.model import Frozen
from windlass.core.ranks.epoch import EpochPlan
from windlass.core.ranks.rendezvous import KEY_BYTES, Meeting
from windlass.engine.client.transport import Port
from windlass.engine.protocol import Launch, Part
from windlass.engine.ranks.process import SECONDS_WITHOUT_BEAT, AskBeat, Beat, Loading, Put, RankJob, RankSaid, Take
from windlass.errors import Error, Impossible
from windlass.fleet.protocol import messages as said
from windlass.fleet.protocol.channel import ChannelLost
from windlass.fleet.protocol.messages import FromWorker
from windlass.fleet.root.board import EpochBoard
from windlass.fleet.root.member import Member
from windlass.fleet.transfer.send import Sending, send
from windlass.fleet.worker.rank_processes import Line, open_line

SECONDS_FOR_A_BEAT = 1.0

MakeEngine = Callable[[Launch, socket.socket | None], Port]
"""What the first rank is told, and its end of the line, to the way to its engine."""


class NodeProgress(Frozen):
    name: str
    doing: str
    """receiving or reading"""
    done_bytes: int
    total_bytes: int


class Blamed(Exception):
    """An epoch that cannot begin, because of one member."""

    def __init__(self, member: str, words: str) -> None:
        super().__init__(words)
        self.member = member


class Epoch:
    """`members`: those with ranks, and perhaps others; the first is the root's own machine."""

    def __init__(
        self,
        number: int,
        launch: Launch,
        plan: EpochPlan,
        members: Sequence[Member],
        sync: str,
        progress: Callable[[NodeProgress], None],
    ) -> None:
        self.number, self.plan, self.members = number, plan, tuple(members)
        self.launch = msgspec.structs.replace(launch, layout=plan.layout)
        self.beats: dict[int, Beat] = {}
        self.held_bytes: dict[int, int] = {}
        """Of weights, by rank; of the first its engine tells itself."""
        self._progress, self._board = progress, EpochBoard()
        self._meeting = meeting_of(plan, members, sync, launch.device)
        self._prepared: dict[str, asyncio.Future[None]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._line: Line | None = None
        self._last_beat = 0.0
        self._loaded: dict[int, tuple[int, int]] = {}
        """By rank, what it has read, and of how much."""
        self._asked: asyncio.Future[Beat] | None = None
        self._is_over = False

    def ranks(self, member: Member) -> list[int]:
        return [rank for rank, node in enumerate(self.plan.nodes) if self.members[node] is member]

    @property
    def taking_part(self) -> list[Member]:
        return [member for member in self.members if self.ranks(member)]

    @property
    def is_crowded(self) -> bool:
        """More ranks on a machine than it has GPUs."""
        return self._meeting.transport == "gloo"

    # --- beginning

    async def prepare(self, sending: Sending) -> None:
        """All machines but this one have their weights when it returns. Raises Blamed."""
        self._source = sending
        others = [member for member in self.taking_part if not member.is_own]
        for member in others:
            slices = await asyncio.to_thread(self._needed, sending, member)
            self._prepared[member.name] = asyncio.get_running_loop().create_future()
            member.wire.post(
                said.Prepare(self.number, sending.catalogue, sending.fingerprint, str(sending.path.absolute()), slices)
            )
        await asyncio.gather(*self._prepared.values())

    def _needed(self, sending: Sending, member: Member) -> list[said.Slice]:
        from windlass.weights.tensors.slices import disjoint

        return disjoint(one for rank in self.ranks(member) for one in sending.needed(self.plan, rank))

    async def start(self, make_engine: MakeEngine) -> Port:
        """The way to the first rank; it is not open yet."""
        for member in self.taking_part:
            jobs = [self._job(rank, member) for rank in self.ranks(member) if rank]
            if jobs:
                member.wire.post(said.Start(self.number, jobs))
        if self.plan.layout.world == 1:
            return make_engine(self.launch, None)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._line = await open_line(ours, self._rank_said, lambda: None)
        except BaseException:
            theirs.close()
            raise
        part = Part(
            meeting=self._meeting,
            epoch=self.number,
            shares=self.plan.shares,
            stages=self.plan.stages,
            socket=theirs.fileno(),
        )
        return make_engine(msgspec.structs.replace(self.launch, part=part), theirs)

    def _job(self, rank: int, member: Member) -> RankJob:
        """What is said is signed but not secret, so the epoch's key goes covered (session.py uncovers it)."""
        key = member.wire.covered(self._meeting.key, said.key_name(self.number))
        return RankJob(
            launch=self.launch,
            rank=rank,
            meeting=msgspec.structs.replace(self._meeting, key=key),
            epoch=self.number,
            shares=self.plan.shares,
            stages=self.plan.stages,
        )

    # --- while it lasts

    def hear(self, member: Member, message: FromWorker) -> None:
        """What concerns the epoch, and is no end of a rank."""
        match message:
            case said.PutNote() | said.TakeNote():
                if message.epoch == self.number:
                    self._board.hear(message, member.wire.post)
            case said.WantParts():
                if message.epoch == self.number:
                    self._begin(self._send(member, message))
            case said.Progress():
                if message.rank < 0:
                    self._tell(member, "receiving", message.done_bytes, message.total_bytes)
                else:
                    self._read(member, message.rank, message.done_bytes, message.total_bytes)
            case said.RankReady():
                if message.epoch == self.number:
                    self.held_bytes[message.rank] = message.weights_bytes
            case said.Prepared():
                self._has_prepared(member, message.epoch, None)
            case said.NotHeld():
                self._has_prepared(member, message.epoch, Blamed(member.name, message.words))
            case said.Beat() | said.Beats():
                self.beats.update({done.rank: done.beat for done in message.ranks})
            case _:
                pass

    def _has_prepared(self, member: Member, number: int, error: Exception | None) -> None:
        waiting = self._prepared.get(member.name)
        if number != self.number or waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error)

    async def _send(self, member: Member, wanted: said.WantParts) -> None:
        async def write(piece: said.CheckpointPiece) -> None:
            await member.wire.send(said.PartData(self.number, piece))

        try:
            await send(self._source, wanted.slices, write, lambda _done, _total: None)  # the worker itself tells what has come
            member.wire.post(said.PartsEnd(self.number))
        except ChannelLost:  # who it was is told by its own connection
            pass
        except Exception as error:  # noqa: BLE001 - the edge of a task: whoever waits is told
            words = str(error) if isinstance(error, Error | OSError) else f"{type(error).__name__}: {error}"
            member.wire.post(said.NoPart(self.number, words))

    def _rank_said(self, heard: RankSaid) -> None:
        """The first rank."""
        match heard:
            case Beat():
                self.beats[0], self._last_beat = heard, time.monotonic()
                if heard.is_answer and self._asked is not None and not self._asked.done():
                    self._asked.set_result(heard)
            case Put() | Take():
                if self._line is not None:
                    self._board.hear_rank(heard, self._line.tell)
            case Loading():
                self.loading(heard.done_bytes, heard.total_bytes)
            case _:
                pass

    def loading(self, done_bytes: int, total_bytes: int) -> None:
        """Of the first rank."""
        self._read(self.members[0], 0, done_bytes, total_bytes)

    def _read(self, member: Member, rank: int, done_bytes: int, total_bytes: int) -> None:
        """All ranks of a machine together."""
        self._loaded[rank] = done_bytes, total_bytes
        found = [self._loaded[other] for other in self.ranks(member) if other in self._loaded]
        self._tell(member, "reading", sum(done for done, _ in found), sum(total for _, total in found))

    def _tell(self, member: Member, doing: str, done_bytes: int, total_bytes: int) -> None:
        self._progress(NodeProgress(name=member.name, doing=doing, done_bytes=done_bytes, total_bytes=total_bytes))

    def silent_seconds(self, now: float) -> float:
        """Of the first rank, once it has said something."""
        return now - self._last_beat if self._last_beat else 0.0

    @property
    def is_stuck(self) -> bool:
        return self.silent_seconds(time.monotonic()) > SECONDS_WITHOUT_BEAT

    async def fresh_beats(self) -> dict[int, Beat]:
        """Of every rank, as of now."""
        asking = [self._ask_members(member) for member in self.taking_part if any(self.ranks(member))]
        await asyncio.gather(self._ask_first(), *asking)
        return dict(self.beats)

    async def _ask_members(self, member: Member) -> None:
        self.beats.update({done.rank: done.beat for done in await member.beats()})

    async def _ask_first(self) -> None:
        if self._line is None:
            return
        self._asked = asyncio.get_running_loop().create_future()
        self._line.tell(AskBeat())
        await asyncio.wait([self._asked], timeout=SECONDS_FOR_A_BEAT)

    # --- ending

    def end(self) -> None:
        """Every machine is told, at once. The first rank is whoever's that opened the way to it. May be called twice."""
        if self._is_over:
            return
        self._is_over = True
        self._board.close()
        for task in self._sending:
            task.cancel()
        for member in self.members:
            member.wire.post(said.EndEpoch(self.number))
        if self._line is not None:
            self._line.close()

    def _begin(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


def meeting_of(plan: EpochPlan, members: Sequence[Member], sync: str, device: str) -> Meeting:
    """Ranks of one machine only meet without a network."""
    nodes = plan.nodes
    is_alone = len(set(nodes)) == 1
    own = own_address(members)
    hosts = {number: "" if is_alone else own if member.is_own else member.probe.address for number, member in enumerate(members)}
    return Meeting(
        key=secrets.token_bytes(KEY_BYTES),
        hosts=tuple(hosts[node] for node in nodes),
        machines=tuple(nodes),
        sync=sync,
        transport=transport_of(plan, members, device),
    )


def own_address(members: Sequence[Member]) -> str:
    """Of this machine, as others see it: one that only a worker on this machine knows is of no use to the rest."""
    found = [member.own_address for member in members if member.own_address]
    outside = [address for address in found if not address.startswith("127.") and address != "::1"]
    return (outside or found or [""])[0]


def transport_of(plan: EpochPlan, members: Sequence[Member], device: str) -> str:
    """NCCL between GPUs, one of them for each rank; where ranks share one, through the hosts."""
    on_gpus = [device != "cpu" if member.is_own else member.probe.device != "cpu" for member in members]
    if not any(on_gpus):
        return "auto"
    if not all(on_gpus):
        names = " and ".join(member.name for member, on_gpu in zip(members, on_gpus, strict=True) if not on_gpu)
        raise Impossible(f"{names} would compute on CPUs and others on GPUs; give all workers and the root one --device")
    crowded = any(list(plan.nodes).count(number) > len(member.probe.gpus) for number, member in enumerate(members))
    return "gloo" if crowded else "auto"


def checkpoint(launch: Launch) -> Path | None:
    """None: weights at random, which every rank makes for itself."""
    return None if launch.random_weights is not None else Path(launch.model)
