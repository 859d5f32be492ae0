"""One epoch: weights sent to the workers, ranks started on all machines (rank 0 here), and all of them ended. On an event loop.

The plan decides its layout, shares and stages; state_machine.py decides whether it continues.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from windlass.core.launch import Launch, RankJob
from windlass.core.model import Frozen
from windlass.core.ranks.epoch import EpochPlan
from windlass.core.ranks.rendezvous import KEY_BYTES, Meeting
from windlass.errors import Error, Impossible
from windlass.runtime.engine.client.transport import EngineTransport
from windlass.runtime.engine.protocol import LoadProgress
from windlass.runtime.engine.ranks.messages import (
    HEARTBEAT_TIMEOUT_SECONDS,
    FromRank,
    HeartbeatRequest,
    PutKey,
    RankHeartbeat,
    TakeKey,
)
from windlass.runtime.fleet.protocol import messages
from windlass.runtime.fleet.protocol.channel import ChannelLost
from windlass.runtime.fleet.protocol.messages import FromWorker
from windlass.runtime.fleet.root.member import Member
from windlass.runtime.fleet.root.store import EpochStore
from windlass.runtime.fleet.transfer.send import CheckpointSender, send
from windlass.runtime.fleet.worker.rank_processes import RankConnection, connect_rank

HEARTBEAT_REPLY_SECONDS = 1.0

MakeEngine = Callable[[RankJob, socket.socket | None], EngineTransport]
"""Rank 0's job and its end of the socket to this supervisor -> the transport to its engine."""


class NodeProgress(Frozen):
    name: str
    doing: str
    """receiving or loading"""
    done_bytes: int
    total_bytes: int


class MemberFailed(Exception):
    """An epoch cannot start because of one machine."""

    def __init__(self, member: str, reason: str) -> None:
        super().__init__(reason)
        self.member = member


def launch_of_ranks(launch: Launch, plan: EpochPlan) -> Launch:
    """What travels: how many other machines there are, not which, and nothing that only the root needs to know."""
    others = ("",) * (len(set(plan.nodes)) - 1)
    return msgspec.structs.replace(launch, layout=plan.layout, workers=others, secret_file=None, planned=None)


class Epoch:
    """`members`: connected machines, the root's first; some may have no ranks."""

    def __init__(
        self,
        number: int,
        launch: Launch,
        plan: EpochPlan,
        members: Sequence[Member],
        progress: Callable[[NodeProgress], None],
    ) -> None:
        self.number, self.plan, self.members = number, plan, tuple(members)
        self.launch = launch_of_ranks(launch, plan)
        self.heartbeats: dict[int, RankHeartbeat] = {}
        self.held_bytes: dict[int, int] = {}
        """Weights by rank, without rank 0, whose engine reports its own."""
        self._progress, self._store = progress, EpochStore()
        self._meeting = meeting_of(plan, members, launch.sync, launch.device)
        self._prepared: dict[str, asyncio.Future[None]] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._connection: RankConnection | None = None
        self._last_heartbeat = 0.0
        self._loaded: dict[int, tuple[int, int]] = {}
        """By rank: bytes loaded, and of how many."""
        self._heartbeat_reply: asyncio.Future[RankHeartbeat] | None = None
        self._is_over = False

    def ranks(self, member: Member) -> list[int]:
        return [rank for rank, node in enumerate(self.plan.nodes) if self.members[node] is member]

    @property
    def participants(self) -> list[Member]:
        return [member for member in self.members if self.ranks(member)]

    @property
    def shares_gpus(self) -> bool:
        """A machine has more ranks than GPUs."""
        return self._meeting.transport == "gloo"

    # --- start

    async def prepare(self, sender: CheckpointSender) -> None:
        """Returns when all workers have their weights. Raises MemberFailed."""
        self._source = sender
        others = [member for member in self.participants if not member.is_root]
        for member in others:
            slices = await asyncio.to_thread(self._slices_of, sender, member)
            self._prepared[member.name] = asyncio.get_running_loop().create_future()
            member.channel.post(
                messages.PrepareWeights(self.number, sender.catalogue, sender.fingerprint, str(sender.path.absolute()), slices)
            )
        await asyncio.gather(*self._prepared.values())

    def _slices_of(self, sender: CheckpointSender, member: Member) -> list[messages.Slice]:
        from windlass.runtime.weights.tensors.slices import disjoint

        return disjoint(one for rank in self.ranks(member) for one in sender.needed(self.plan, rank))

    async def start(self, make_engine: MakeEngine) -> EngineTransport:
        """The transport to rank 0; it is not open yet."""
        for member in self.participants:
            jobs = [self._job(rank, self._remote_meeting(member)) for rank in self.ranks(member) if rank]
            if jobs:
                member.channel.post(messages.StartRanks(self.number, jobs))
        if self.plan.layout.world == 1:
            return make_engine(RankJob(launch=self.launch, epoch=self.number), None)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connection = await connect_rank(ours, self._on_rank_message, lambda: None)
        except BaseException:
            theirs.close()
            raise
        return make_engine(self._job(0, self._meeting, supervisor_fd=theirs.fileno()), theirs)

    def _job(self, rank: int, meeting: Meeting, supervisor_fd: int = -1) -> RankJob:
        return RankJob(
            launch=self.launch,
            rank=rank,
            meeting=meeting,
            epoch=self.number,
            shares=self.plan.shares,
            stages=self.plan.stages,
            supervisor_fd=supervisor_fd,
        )

    def _remote_meeting(self, member: Member) -> Meeting:
        """Frames are signed but not encrypted, so the epoch's key travels masked (session.py unmasks it)."""
        key = member.channel.mask_key(self._meeting.key, messages.key_name(self.number))
        return msgspec.structs.replace(self._meeting, key=key)

    # --- while it runs

    def handle(self, member: Member, message: FromWorker) -> None:
        """A message about this epoch, other than the end of a rank."""
        match message:
            case messages.PutEpochKey() | messages.TakeEpochKey():
                if message.epoch == self.number:
                    self._store.handle(message, member.channel.post)
            case messages.PiecesRequest():
                if message.epoch == self.number:
                    self._run(self._send(member, message))
            case messages.TransferProgress():
                if message.rank < 0:
                    self._report(member, "receiving", message.done_bytes, message.total_bytes)
                else:
                    self._loaded_by(member, message.rank, message.done_bytes, message.total_bytes)
            case messages.RankReady():
                if message.epoch == self.number:
                    self.held_bytes[message.rank] = message.weights_bytes
            case messages.WeightsPrepared():
                self._set_prepared(member, message.epoch, None)
            case messages.PrepareFailed():
                self._set_prepared(member, message.epoch, MemberFailed(member.name, message.reason))
            case messages.Heartbeat() | messages.Heartbeats():
                self.heartbeats.update({done.rank: done.heartbeat for done in message.ranks})
            case _:
                pass

    def _set_prepared(self, member: Member, number: int, error: Exception | None) -> None:
        waiting = self._prepared.get(member.name)
        if number != self.number or waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error)

    async def _send(self, member: Member, wanted: messages.PiecesRequest) -> None:
        async def write(piece: messages.CheckpointPiece) -> None:
            await member.channel.send(messages.PieceData(self.number, piece))

        try:
            await send(self._source, wanted.slices, write, lambda _done, _total: None)  # the worker itself reports progress
            member.channel.post(messages.PiecesEnd(self.number))
        except ChannelLost:  # the connection itself reports which worker it was
            pass
        except Exception as error:  # noqa: BLE001 - the edge of a task: the worker that waits is told
            reason = str(error) if isinstance(error, Error | OSError) else f"{type(error).__name__}: {error}"
            member.channel.post(messages.PiecesFailed(self.number, reason))

    def _on_rank_message(self, message: FromRank) -> None:
        """From rank 0."""
        match message:
            case RankHeartbeat():
                self.heartbeats[0], self._last_heartbeat = message, time.monotonic()
                if message.is_reply and self._heartbeat_reply is not None and not self._heartbeat_reply.done():
                    self._heartbeat_reply.set_result(message)
            case PutKey() | TakeKey():
                if self._connection is not None:
                    self._store.handle_rank(message, self._connection.send)
            case LoadProgress():
                self.loading(message.done_bytes, message.total_bytes)
            case _:
                pass

    def loading(self, done_bytes: int, total_bytes: int) -> None:
        """Rank 0."""
        self._loaded_by(self.members[0], 0, done_bytes, total_bytes)

    def _loaded_by(self, member: Member, rank: int, done_bytes: int, total_bytes: int) -> None:
        """Reported as one sum for all ranks of a machine."""
        self._loaded[rank] = done_bytes, total_bytes
        found = [self._loaded[other] for other in self.ranks(member) if other in self._loaded]
        self._report(member, "loading", sum(done for done, _ in found), sum(total for _, total in found))

    def _report(self, member: Member, doing: str, done_bytes: int, total_bytes: int) -> None:
        self._progress(NodeProgress(name=member.name, doing=doing, done_bytes=done_bytes, total_bytes=total_bytes))

    def silent_seconds(self, now: float) -> float:
        """Since the last heartbeat of rank 0; 0 before the first."""
        return now - self._last_heartbeat if self._last_heartbeat else 0.0

    @property
    def is_stuck(self) -> bool:
        return self.silent_seconds(time.monotonic()) > HEARTBEAT_TIMEOUT_SECONDS

    async def fresh_heartbeats(self) -> dict[int, RankHeartbeat]:
        """Of every rank, requested now."""
        asking = [self._request_from(member) for member in self.participants if any(self.ranks(member))]
        await asyncio.gather(self._request_from_rank_0(), *asking)
        return dict(self.heartbeats)

    async def _request_from(self, member: Member) -> None:
        self.heartbeats.update({done.rank: done.heartbeat for done in await member.heartbeats()})

    async def _request_from_rank_0(self) -> None:
        if self._connection is None:
            return
        self._heartbeat_reply = asyncio.get_running_loop().create_future()
        self._connection.send(HeartbeatRequest())
        await asyncio.wait([self._heartbeat_reply], timeout=HEARTBEAT_REPLY_SECONDS)

    # --- end

    def end(self) -> None:
        """Tells every machine. Rank 0 is ended by whoever opened its transport. May be called twice."""
        if self._is_over:
            return
        self._is_over = True
        self._store.close()
        for task in self._sending:
            task.cancel()
        for member in self.members:
            member.channel.post(messages.EndEpoch(self.number))
        if self._connection is not None:
            self._connection.close()

    def _run(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


def meeting_of(plan: EpochPlan, members: Sequence[Member], sync: str, device: str) -> Meeting:
    """How the ranks find each other; without addresses if all are on one machine."""
    nodes = plan.nodes
    is_alone = len(set(nodes)) == 1
    here = root_address(members)
    hosts = {
        number: "" if is_alone else here if member.is_root else member.probe.address for number, member in enumerate(members)
    }
    return Meeting(
        key=secrets.token_bytes(KEY_BYTES),
        hosts=tuple(hosts[node] for node in nodes),
        machines=tuple(nodes),
        sync=sync,
        transport=transport_of(plan, members, device),
    )


def root_address(members: Sequence[Member]) -> str:
    """Of this machine, as workers see it; a loopback address only if there is no other."""
    found = [member.root_address for member in members if member.root_address]
    outside = [address for address in found if not address.startswith("127.") and address != "::1"]
    return (outside or found or [""])[0]


def transport_of(plan: EpochPlan, members: Sequence[Member], device: str) -> str:
    """`auto` is NCCL between GPUs, which needs one per rank; if ranks share a GPU, gloo through host memory."""
    on_gpus = [device != "cpu" if member.is_root else member.probe.device != "cpu" for member in members]
    if not any(on_gpus):
        return "auto"
    if not all(on_gpus):
        names = " and ".join(member.name for member, on_gpu in zip(members, on_gpus, strict=True) if not on_gpu)
        raise Impossible(
            f"{names} would run on CPUs and the others on GPUs; start all workers and the root with the same --device"
        )
    crowded = any(list(plan.nodes).count(number) > len(member.probe.gpus) for number, member in enumerate(members))
    return "gloo" if crowded else "auto"


def checkpoint(launch: Launch) -> Path | None:
    """None: random weights, which every rank makes for itself."""
    return None if launch.random_weights is not None else Path(launch.model)
