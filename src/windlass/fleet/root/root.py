"""The root's side of a fleet, in the process in front: a connection to every worker, one epoch after another, and the way to its engine.

`Fleet.transport` makes an EngineTransport for `EngineRequests`. Opening it begins an epoch with the machines that are here (this one always is); its
`lost` reports `EngineMoved` when the epoch ended through no fault of a request: EngineRequests then opens the next transport and replays what was
in flight. What to do next is decided in epoch.py; here it is done. What a layout is made of is not known here: `replan` is given.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from windlass.core.client import Unavailable
from windlass.core.launch import Launch, RankJob
from windlass.core.ranks.epoch import EpochPlan, Node
from windlass.core.request import Info
from windlass.engine.client.replay import EngineMoved
from windlass.engine.client.transport import EngineTransport, Lost, ProcessTransport, Receive
from windlass.engine.protocol import Command, EngineFailed, EngineReady, InfoReply, LoadProgress, Report, as_error
from windlass.engine.ranks.messages import RankHeartbeat
from windlass.errors import Error
from windlass.fleet.protocol import messages
from windlass.fleet.protocol.channel import ChannelLost, keep_alive
from windlass.fleet.protocol.handshake import NotAdmitted
from windlass.fleet.root import events
from windlass.fleet.root.epoch import Epoch, MakeEngine, MemberFailed, NodeProgress, checkpoint
from windlass.fleet.root.events import Event, FailRequests, FleetState, StartEpoch, StopEpoch
from windlass.fleet.root.loopback import LoopbackMachine
from windlass.fleet.root.member import ROOT, Member, WorkerRefused, join
from windlass.fleet.root.state_machine import next_action
from windlass.fleet.transfer.send import CheckpointSender

Replan = Callable[[Sequence[Node]], EpochPlan]
"""The machines that are here, this one first, to a layout, shares, stages, and who has which ranks. Raises DoesNotFit."""
SECONDS_BETWEEN_TICKS = 0.25
SECONDS_BETWEEN_DIALS, SECONDS_AFTER_REFUSAL = 1.0, 5.0
ROOT_BYTES = 16


class NodeStatus(msgspec.Struct, frozen=True):
    """For people to look at."""

    name: str
    address: str
    state: str
    share: float


def process_engine(job: RankJob, supervised: socket.socket | None) -> EngineTransport:
    return ProcessTransport(job, supervised)


class Fleet:
    def __init__(
        self,
        launch: Launch,
        replan: Replan,
        secret: bytes = b"",
        *,
        notify: Callable[[str], None] = lambda _: None,
        progress: Callable[[NodeProgress], None] = lambda _: None,
        make_engine: MakeEngine = process_engine,
    ) -> None:
        """`notify` gets a line for whatever an operator should know.

        Nothing begins before the first transport is opened, on the event loop that runs then.
        """
        self._launch, self._replan, self._secret = launch, replan, secret
        self._notify, self._progress, self._make_engine = notify, progress, make_engine
        self._state = FleetState(workers=tuple(events.WorkerState(name=name) for name in launch.workers))
        self._id, self._host = secrets.token_bytes(ROOT_BYTES), socket.gethostname()
        self._members: dict[str, Member] = {}
        self._own: LoopbackMachine | None = None
        self._transport: FleetTransport | None = None
        self._epoch: Epoch | None = None
        self._beginning: asyncio.Task[None] | None = None
        self._leaving: list[EngineTransport] = []
        self._sending: CheckpointSender | None = None
        self._problem: Error | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closed = False

    # --- for whoever is in front

    def transport(self) -> EngineTransport:
        """The way to the engine of the next epoch, which begins when it is opened."""
        return FleetTransport(self)

    @property
    def plan(self) -> EpochPlan | None:
        """Of the epoch there is."""
        return None if self._epoch is None else self._epoch.plan

    @property
    def nodes(self) -> tuple[NodeStatus, ...]:
        epoch = self._epoch
        found = [NodeStatus(ROOT, "", self._state.phase, _share(epoch, ROOT))]
        for worker in self._state.workers:
            taking_part = epoch is not None and any(member.name == worker.name for member in epoch.taking_part)
            state = "lost" if not worker.is_connected else self._state.phase if taking_part else "waiting"
            member = self._members.get(worker.name)
            found.append(NodeStatus(worker.name, member.probe.address if member else "", state, _share(epoch, worker.name)))
        return tuple(found)

    @property
    def names(self) -> tuple[str, ...]:
        """Of each rank of the epoch there is, its machine's."""
        epoch = self._epoch
        return () if epoch is None else tuple(epoch.members[node].name for node in epoch.plan.nodes)

    def own_node(self, num_ranks: int) -> Node:
        """This machine, as it was found."""
        return self._members[ROOT].node(num_ranks)

    async def heartbeats(self) -> dict[int, RankHeartbeat]:
        """Of every rank of the epoch there is, as of now."""
        return {} if self._epoch is None else await self._epoch.fresh_heartbeats()

    async def close(self) -> None:
        """Every rank ends, every worker is told goodbye. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.kill()
        self._event(events.EngineReleased())
        for member in self._members.values():
            member.channel.post(messages.Goodbye("the root ends"))
        tasks = [*self._tasks, *([self._beginning] if self._beginning is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._left()
        if self._own is not None:
            await self._own.close()
        if self._sending is not None:
            self._sending.close()

    # --- for its transports

    def want(self, transport: FleetTransport) -> None:
        if self._is_closed:
            transport.over(Unavailable("this client is closed"))
            return
        self._open()
        if self._transport is not None:  # somebody gave it up, and did not wait for its end
            self.unwant(self._transport)
        self._transport = transport
        self._event(events.EngineRequested())

    def unwant(self, transport: FleetTransport) -> None:
        if transport is self._transport:
            self._transport = None
            self._event(events.EngineReleased())

    def engine_said(self, transport: FleetTransport, report: Report) -> Report | None:
        """What the first rank reports, as it goes on; None: it does not."""
        epoch = self._epoch
        if transport is not self._transport or epoch is None:
            return None
        match report:
            case EngineReady():
                self._event(events.EpochReady())
                self._notify(f"epoch {epoch.number} is ready: {_described(epoch)}")
                return EngineReady(self._shown(report.info))
            case InfoReply():
                return InfoReply(report.id, self._shown(report.info))
            case LoadProgress():
                epoch.loading(report.done_bytes, report.total_bytes)
            case EngineFailed():
                self._engine_failed(report)
                return None
            case _:
                pass
        return report

    def engine_lost(self, transport: FleetTransport, error: Error) -> None:
        """Who lost its group has said so, and ended."""
        if transport is self._transport and self._state.suspected is None:
            self._event(events.EngineExited(kind="", reason=str(error)))

    # --- machines that come and go

    def _open(self) -> None:
        if self._own is not None:
            return
        self._own = LoopbackMachine(self._launch.device)
        own = self._members[ROOT] = Member(ROOT, self._own.channel)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._listen(own)), loop.create_task(self._tick())]
        self._tasks += [loop.create_task(self._keep(worker.name)) for worker in self._state.workers]

    async def _keep(self, name: str) -> None:
        """Connected, and again whenever it is lost."""
        while True:
            pause, refused = SECONDS_BETWEEN_DIALS, False
            try:
                member = await join(name, self._secret, self._id, self._host)
                reason = await self._hold(member)
            except (NotAdmitted, WorkerRefused) as error:
                reason, refused, pause = str(error), True, SECONDS_AFTER_REFUSAL
            except ChannelLost as error:
                reason = str(error)
            self._event(events.WorkerLost(name=name, reason=reason, is_refused=refused))
            await asyncio.sleep(pause)

    async def _hold(self, member: Member) -> str:
        """Until it is lost; in reason why."""
        doing = [asyncio.ensure_future(work) for work in (self._listen(member), keep_alive(member.channel))]
        looking = asyncio.ensure_future(member.look())
        try:
            await asyncio.wait([looking, *doing], return_when=asyncio.FIRST_COMPLETED)
            if looking.done():
                looking.result()
                self._members[member.name] = member
                self._event(events.WorkerJoined(name=member.name))
                await asyncio.wait(doing, return_when=asyncio.FIRST_COMPLETED)
            return next(str(task.exception() or "it said goodbye") for task in doing if task.done())
        finally:
            self._members.pop(member.name, None)
            for task in (looking, *doing):
                task.cancel()
            await asyncio.gather(looking, *doing, return_exceptions=True)
            member.channel.close()

    async def _listen(self, member: Member) -> None:
        while not isinstance(message := await member.channel.receive(), messages.Goodbye):
            if member.hear(message):
                continue
            epoch = self._epoch
            if isinstance(message, messages.RankEnded):
                self._rank_ended(member, message)
            elif epoch is not None:
                epoch.hear(member, message)

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_TICKS)
            now = time.monotonic()
            was_asleep, last = now - last > 1.0, now  # this process itself: what came meanwhile has not been read yet
            if self._epoch is not None and self._epoch.is_stuck and not was_asleep:
                silent = self._epoch.silent_seconds(now)
                self._event(events.EngineExited(kind="Stuck", reason=f"the engine gave no sign of life for {silent:.1f} s"))
            self._event(events.Tick())

    # --- what has happened

    def _rank_ended(self, member: Member, ended: messages.RankEnded) -> None:
        if self._epoch is None or ended.epoch != self._epoch.number:
            return
        name = "" if member.is_own else member.name
        if self._state.phase == "starting" and ended.kind not in ("", events.GROUP_LOST, "Stuck"):
            self._problem = as_error(
                EngineFailed(ended.kind, f"{member.name}, rank {ended.rank}: {ended.reason}", ended.short_bytes)
            )
            self._event(events.EpochStartFailed(reason=str(self._problem), name=name))
        else:
            self._event(events.RankExited(name=name, kind=ended.kind, reason=ended.reason))

    def _engine_failed(self, failed: EngineFailed) -> None:
        error = as_error(failed)
        if failed.kind == events.GROUP_LOST or isinstance(error, Unavailable):
            self._event(events.EngineExited(kind=failed.kind, reason=str(error)))
        else:
            self._problem = error
            self._event(events.EpochStartFailed(reason=str(error)))

    def _event(self, event: Event) -> None:
        self._state, actions = next_action(self._state, event, time.monotonic())
        is_refused = any(isinstance(action, FailRequests) for action in actions)
        for action in actions:
            match action:
                case StartEpoch():
                    self._begin(action)
                case StopEpoch():
                    self._end(action, is_refused)
                case FailRequests():
                    self._refuse(action)

    # --- what is done about it

    def _begin(self, begin: StartEpoch) -> None:
        self._beginning = asyncio.get_running_loop().create_task(self._begun(begin))

    async def _begun(self, begin: StartEpoch) -> None:
        transport = self._transport
        assert transport is not None
        try:
            await self._left()
            epoch = await self._planned(begin)
            path = checkpoint(self._launch)
            if path is not None and len(epoch.taking_part) > 1:
                await epoch.prepare(await self._opened(path))
            engine = await epoch.start(self._make_engine)
            self._leaving.append(engine)
            transport.begin(engine)
        except MemberFailed as error:
            self._event(events.EpochStartFailed(reason=str(error), name=error.member))
        except ChannelLost as error:  # its own connection reports who it was
            self._notify(f"epoch {begin.number} did not begin: {error}")
        except Error as error:
            self._problem = error
            self._event(events.EpochStartFailed(reason=str(error)))
        except Exception as error:  # noqa: BLE001 - the edge of a task: the waiting request fails with it
            self._problem = Unavailable(f"epoch {begin.number} could not begin: {type(error).__name__}: {error}")
            self._event(events.EpochStartFailed(reason=str(self._problem)))

    async def _planned(self, begin: StartEpoch) -> Epoch:
        members = [self._members[name] for name in (ROOT, *begin.members) if name in self._members]
        await asyncio.gather(*(self._looked_at(member) for member in members))
        nodes = [member.node(self._launch.ranks_per_machine) for member in members]
        plan = await asyncio.to_thread(self._replan, nodes)
        epoch = self._epoch = Epoch(begin.number, self._launch, plan, members, self._progress)
        self._notify(f"epoch {begin.number} begins: {_described(epoch)}")
        if epoch.is_crowded:
            self._notify(
                f"epoch {begin.number}: ranks share a GPU, so what they say to each other goes through the host, which is slow"
            )
        for remark in plan.remarks:
            self._notify(f"epoch {begin.number}: {remark}")
        return epoch

    async def _looked_at(self, member: Member) -> None:
        try:
            await member.look()
        except ChannelLost as error:
            if member.is_own:
                raise Unavailable(f"this machine could not be measured: {error}") from None
            raise MemberFailed(member.name, str(error)) from None

    async def _opened(self, path: Any) -> CheckpointSender:
        if self._sending is None:
            self._sending = await asyncio.to_thread(CheckpointSender, path)
        return self._sending

    async def _left(self) -> None:
        """Engines of epochs that are over hold memory until they are gone."""
        while self._leaving:
            await self._leaving[0].close()  # who is interrupted here leaves it for the next to wait for
            self._leaving.pop(0)

    def _end(self, end: StopEpoch, is_refused: bool) -> None:
        if self._beginning is not None and self._beginning is not asyncio.current_task():
            self._beginning.cancel()
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.end()
        transport = self._transport
        if transport is None:
            return
        transport.kill()
        if not is_refused:
            self._transport = None
            self._notify(f"epoch {end.number} is over: {end.reason}")
            transport.over(EngineMoved(end.reason) if end.blameless else Unavailable(end.reason))

    def _refuse(self, refuse: FailRequests) -> None:
        transport, self._transport = self._transport, None
        problem, self._problem = self._problem, None
        if transport is not None:
            transport.over(problem or Unavailable(refuse.reason))

    def _shown(self, info: Info) -> Info:
        epoch = self._epoch
        if epoch is None:
            return info
        details = {"nodes": ", ".join(member.name for member in epoch.taking_part), "epoch": str(epoch.number)}
        return msgspec.structs.replace(
            info,
            weights_bytes=info.weights_bytes + sum(epoch.held_bytes.values()),
            details={**info.details, **details, "layout": str(epoch.plan.layout)},
        )


class FleetTransport:
    """One epoch's engine, from when it is asked for to when it is gone."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._engine: EngineTransport | None = None
        self._is_over = False

    def open(self, receive: Receive, lost: Lost) -> None:
        self._receive, self._lost = receive, lost
        self._fleet.want(self)

    def begin(self, engine: EngineTransport) -> None:
        if self._is_over:
            return
        self._engine = engine
        engine.open(self._said, lambda error: self._fleet.engine_lost(self, error))

    def send(self, command: Command) -> None:
        if self._engine is not None:
            self._engine.send(command)

    def kill(self) -> None:
        if self._engine is not None:
            self._engine.kill()

    async def close(self) -> None:
        self._is_over = True
        self._fleet.unwant(self)
        if self._engine is not None:
            self._engine.kill()
            await self._engine.close()

    def over(self, error: Error) -> None:
        """Nothing comes after it."""
        if not self._is_over:
            self._is_over = True
            asyncio.get_running_loop().call_soon(self._lost, error)  # not in the middle of what led to it

    def _said(self, report: Report) -> None:
        report_on = None if self._is_over else self._fleet.engine_said(self, report)
        if report_on is not None:
            self._receive(report_on)


def _described(epoch: Epoch) -> str:
    names = ", ".join(f"{member.name} ({_ranks(epoch.ranks(member))})" for member in epoch.taking_part)
    return f"{epoch.plan.layout} over {names}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _share(epoch: Epoch | None, name: str) -> float:
    """Of the bytes that all ranks hold."""
    if epoch is None:
        return 0.0
    ranks = [rank for member in epoch.members if member.name == name for rank in epoch.ranks(member)]
    held = epoch.plan.rank_bytes or (1,) * epoch.plan.layout.world
    return sum(held[rank] for rank in ranks) / sum(held)
