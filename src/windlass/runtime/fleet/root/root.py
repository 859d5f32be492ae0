"""The root of a fleet, in the process that takes the requests: one epoch after another, and the transport to its engine.

`Fleet.transport` makes an EngineTransport for EngineRequests. Opening it starts an epoch with the machines that are connected (this one
always is). Its `lost` reports `EngineMoved` when the epoch ended through no fault of a request: EngineRequests then opens the next
transport and replays what was in flight. state_machine.py decides what to do next, this module does it. The layout is chosen by `replan`.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from windlass.core.client import Unavailable
from windlass.core.launch import Launch, RankJob
from windlass.core.ranks.epoch import EpochPlan, Node
from windlass.errors import Error
from windlass.runtime.engine.client.replay import EngineMoved
from windlass.runtime.engine.client.transport import EngineTransport, ProcessTransport
from windlass.runtime.engine.protocol import EngineFailed, EngineReady, InfoReply, LoadProgress, Report, as_error
from windlass.runtime.engine.ranks.messages import RankHeartbeat
from windlass.runtime.fleet.protocol import messages
from windlass.runtime.fleet.protocol.channel import ChannelLost
from windlass.runtime.fleet.protocol.messages import FromWorker
from windlass.runtime.fleet.root import events
from windlass.runtime.fleet.root.describe import NodeStatus, describe_epoch, node_statuses, with_epoch
from windlass.runtime.fleet.root.epoch import Epoch, MakeEngine, MemberFailed, NodeProgress, checkpoint
from windlass.runtime.fleet.root.events import Event, FailRequests, FleetState, StartEpoch, StopEpoch
from windlass.runtime.fleet.root.member import ROOT, Member
from windlass.runtime.fleet.root.state_machine import next_action
from windlass.runtime.fleet.root.transport import FleetTransport
from windlass.runtime.fleet.root.workers import WorkerConnections
from windlass.runtime.fleet.transfer.send import CheckpointSender

Replan = Callable[[Sequence[Node]], EpochPlan]
"""The connected machines, this one first -> layout, shares, stages, and which ranks each machine runs. Raises DoesNotFit."""
SECONDS_BETWEEN_TICKS = 0.25
SUSPENDED_SECONDS = 1.0
"""A tick so late means that this process itself did not run: messages of others have not been read yet."""


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
        """`notify` gets lines for the operator. Nothing starts before the first transport is opened, on the event loop that runs then."""
        self._launch, self._replan = launch, replan
        self._notify, self._progress, self._make_engine = notify, progress, make_engine
        self._state = FleetState(workers=tuple(events.WorkerState(name=name) for name in launch.workers))
        self._connections = WorkerConnections(launch.workers, secret, self._on_event, self._on_message)
        self._transport: FleetTransport | None = None
        self._epoch: Epoch | None = None
        self._starting: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._old_engines: list[EngineTransport] = []
        self._sender: CheckpointSender | None = None
        self._problem: Error | None = None
        """Why the current epoch could not start."""
        self._is_closed = False

    # --- for the client

    def transport(self) -> EngineTransport:
        """To the engine of the next epoch, which starts when it is opened."""
        return FleetTransport(self)

    @property
    def plan(self) -> EpochPlan | None:
        """Of the current epoch."""
        return None if self._epoch is None else self._epoch.plan

    @property
    def nodes(self) -> tuple[NodeStatus, ...]:
        return node_statuses(self._state, self._connections.members, self._epoch)

    @property
    def rank_machines(self) -> tuple[str, ...]:
        """The machine of each rank of the current epoch."""
        epoch = self._epoch
        return () if epoch is None else tuple(epoch.members[node].name for node in epoch.plan.nodes)

    @property
    def last_heartbeats(self) -> dict[int, RankHeartbeat]:
        """Of every rank of the current epoch that has sent one; half a second old."""
        return {} if self._epoch is None else self._epoch.heartbeats

    def local_node(self, num_ranks: int) -> Node:
        """This machine, as it was measured."""
        return self._connections.members[ROOT].node(num_ranks)

    async def heartbeats(self) -> dict[int, RankHeartbeat]:
        """Of every rank of the current epoch, requested now."""
        return {} if self._epoch is None else await self._epoch.fresh_heartbeats()

    async def close(self) -> None:
        """Ends every rank and tells every worker goodbye. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.kill()
        self._on_event(events.EngineReleased())
        self._connections.say_goodbye()
        tasks = [task for task in (self._ticking, self._starting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(self._connections.disconnect(), *tasks, return_exceptions=True)
        await self._close_old_engines()
        await self._connections.close()
        if self._sender is not None:
            self._sender.close()

    # --- for its transports

    def request_engine(self, transport: FleetTransport) -> None:
        if self._is_closed:
            transport.fail(Unavailable("this client is closed"))
            return
        if not self._connections.is_open:
            self._connections.open(self._launch.device)
            self._ticking = asyncio.get_running_loop().create_task(self._tick())
        if self._transport is not None:  # given up by its user, who did not wait for its end
            self.release_engine(self._transport)
        self._transport = transport
        self._on_event(events.EngineRequested())

    def release_engine(self, transport: FleetTransport) -> None:
        if transport is self._transport:
            self._transport = None
            self._on_event(events.EngineReleased())

    def engine_reported(self, transport: FleetTransport, report: Report) -> Report | None:
        epoch = self._epoch
        if transport is not self._transport or epoch is None:
            return None
        match report:
            case EngineReady():
                self._on_event(events.EpochReady())
                self._notify(f"epoch {epoch.number} is ready: {describe_epoch(epoch)}")
                return EngineReady(with_epoch(report.info, epoch))
            case InfoReply():
                return InfoReply(report.id, with_epoch(report.info, epoch))
            case LoadProgress():
                epoch.loading(report.done_bytes, report.total_bytes)
            case EngineFailed():
                self._engine_failed(report)
                return None
            case _:
                pass
        return report

    def engine_lost(self, transport: FleetTransport, error: Error) -> None:
        """An engine that lost its group reported it before it exited: then this says nothing new."""
        if transport is self._transport and self._state.suspected is None:
            self._on_event(events.EngineExited(kind="", reason=str(error)))

    # --- events

    def _on_message(self, member: Member, message: FromWorker) -> None:
        if isinstance(message, messages.RankEnded):
            self._rank_ended(member, message)
        elif self._epoch is not None:
            self._epoch.handle(member, message)

    def _rank_ended(self, member: Member, ended: messages.RankEnded) -> None:
        if self._epoch is None or ended.epoch != self._epoch.number:
            return
        name = "" if member.is_root else member.name
        if self._state.phase == "starting" and ended.kind not in ("", events.GROUP_LOST, "Stuck"):
            reason = f"{member.name}, rank {ended.rank}: {ended.reason}"
            self._start_failed(as_error(EngineFailed(ended.kind, reason, ended.short_bytes)), name)
        else:
            self._on_event(events.RankExited(name=name, kind=ended.kind, reason=ended.reason))

    def _engine_failed(self, failed: EngineFailed) -> None:
        error = as_error(failed)
        if failed.kind == events.GROUP_LOST or isinstance(error, Unavailable):
            self._on_event(events.EngineExited(kind=failed.kind, reason=str(error)))
        else:
            self._start_failed(error)

    def _start_failed(self, error: Error, name: str = "") -> None:
        self._problem = error
        self._on_event(events.EpochStartFailed(reason=str(error), name=name))

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_TICKS)
            now = time.monotonic()
            was_suspended, last = now - last > SUSPENDED_SECONDS, now
            if self._epoch is not None and self._epoch.is_stuck and not was_suspended:
                silent = self._epoch.silent_seconds(now)
                self._on_event(events.EngineExited(kind="Stuck", reason=f"the engine sent no heartbeat for {silent:.1f} s"))
            self._on_event(events.Tick())

    def _on_event(self, event: Event) -> None:
        self._state, actions = next_action(self._state, event, time.monotonic())
        requests_fail = any(isinstance(action, FailRequests) for action in actions)
        for action in actions:
            match action:
                case StartEpoch():
                    self._starting = asyncio.get_running_loop().create_task(self._start(action))
                case StopEpoch():
                    self._stop(action, requests_fail)
                case FailRequests():
                    self._fail_requests(action)

    # --- actions

    async def _start(self, start: StartEpoch) -> None:
        transport = self._transport
        assert transport is not None
        try:
            await self._close_old_engines()
            epoch = await self._plan_epoch(start)
            path = checkpoint(self._launch)
            if path is not None and len(epoch.participants) > 1:
                await epoch.prepare(await self._open_sender(path))
            engine = await epoch.start(self._make_engine)
            self._old_engines.append(engine)
            transport.attach(engine)
        except MemberFailed as error:
            self._on_event(events.EpochStartFailed(reason=str(error), name=error.member))
        except ChannelLost as error:  # the connection itself reports which worker it was
            self._notify(f"epoch {start.number} did not start: {error}")
        except Error as error:
            self._start_failed(error)
        except Exception as error:  # noqa: BLE001 - the edge of a task: waiting requests fail with it
            self._start_failed(Unavailable(f"epoch {start.number} could not start: {type(error).__name__}: {error}"))

    async def _plan_epoch(self, start: StartEpoch) -> Epoch:
        connected = self._connections.members
        members = [connected[name] for name in (ROOT, *start.members) if name in connected]
        await asyncio.gather(*(_measure(member) for member in members))
        nodes = [member.node(self._launch.ranks_per_machine) for member in members]
        plan = await asyncio.to_thread(self._replan, nodes)
        epoch = self._epoch = Epoch(start.number, self._launch, plan, members, self._progress)
        self._notify(f"epoch {start.number} starts: {describe_epoch(epoch)}")
        if epoch.shares_gpus:
            self._notify(f"epoch {start.number}: several ranks share a GPU, so collectives go through host memory, which is slow")
        for remark in plan.remarks:
            self._notify(f"epoch {start.number}: {remark}")
        return epoch

    async def _open_sender(self, path: Path) -> CheckpointSender:
        if self._sender is None:
            self._sender = await asyncio.to_thread(CheckpointSender, path)
        return self._sender

    async def _close_old_engines(self) -> None:
        """They hold memory until they are gone."""
        while self._old_engines:
            await self._old_engines[0].close()  # if cancelled here, the next caller waits for it
            self._old_engines.pop(0)

    def _stop(self, stop: StopEpoch, requests_fail: bool) -> None:
        if self._starting is not None and self._starting is not asyncio.current_task():
            self._starting.cancel()
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            epoch.end()
        transport = self._transport
        if transport is None:
            return
        transport.kill()
        if not requests_fail:
            self._transport = None
            self._notify(f"epoch {stop.number} is over: {stop.reason}")
            transport.fail(EngineMoved(stop.reason) if stop.blameless else Unavailable(stop.reason))

    def _fail_requests(self, action: FailRequests) -> None:
        transport, self._transport = self._transport, None
        problem, self._problem = self._problem, None
        if transport is not None:
            transport.fail(problem or Unavailable(action.reason))


async def _measure(member: Member) -> None:
    try:
        await member.measure()
    except ChannelLost as error:
        if member.is_root:
            raise Unavailable(f"this machine could not be measured: {error}") from None
        raise MemberFailed(member.name, str(error)) from None
