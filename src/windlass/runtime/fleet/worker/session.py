"""A supervisor's side of the connection to one root: carries out its messages in order, and ends all ranks when the root is gone.

The same code runs on a worker and on the root's own machine: a MessageChannel may be TCP or memory.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from windlass.core.launch import RankJob
from windlass.errors import Error
from windlass.runtime.engine.protocol import EngineFailed, LoadProgress
from windlass.runtime.engine.ranks.messages import FromRank, KeyFound, KeyMissing, PutKey, RankBuilt, TakeKey
from windlass.runtime.fleet.protocol import messages
from windlass.runtime.fleet.protocol.channel import MessageChannel, keep_alive
from windlass.runtime.fleet.protocol.messages import FromRoot, FromWorker
from windlass.runtime.fleet.worker.config import WorkerConfig, WorkerLog
from windlass.runtime.fleet.worker.probe import probe_answer
from windlass.runtime.fleet.worker.rank_processes import RankProcess
from windlass.runtime.fleet.worker.receive import PreparedWeights, WeightReceiver
from windlass.runtime.machine.system import this_system
from windlass.units import format_bytes

SECONDS_BETWEEN_CHECKS, SECONDS_BETWEEN_STATUS = 0.5, 1.0
SHUTTING_DOWN = "this worker is shutting down"


@dataclass
class WorkerEpoch:
    number: int
    world: int = 1
    processes: dict[int, RankProcess] = field(default_factory=dict[int, RankProcess])
    began: float = field(default_factory=time.monotonic)
    ready: set[int] = field(default_factory=set[int])
    loading: dict[int, LoadProgress] = field(default_factory=dict[int, LoadProgress])
    last: tuple[float, int] = (0.0, 0)
    """Time and rows at the last status."""

    @property
    def name(self) -> str:
        ranks = sorted(self.processes)
        return f"epoch {self.number}, rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {self.world}"

    @property
    def rows(self) -> int:
        return max((process.heartbeat.rows for process in self.processes.values()), default=0)

    def status(self, now: float) -> str:
        """Rates are over the time since the last call."""
        since, rows = self.last
        self.last = now, self.rows
        if self.ready == self.processes.keys():
            return f"{self.name}: {(self.rows - rows) / (now - since):.1f} tokens/s"
        done, total = (sum(getattr(one, what) for one in self.loading.values()) for what in ("done_bytes", "total_bytes"))
        return f"{self.name}: " + (f"loading, {format_bytes(done)} of {format_bytes(total)}" if total else "starting")


class Session:
    def __init__(
        self, channel: MessageChannel[FromWorker, FromRoot], config: WorkerConfig, log: WorkerLog, local_address: str = ""
    ) -> None:
        self._channel, self._config, self._log = channel, config, log
        self._address = config.address or local_address
        self._epoch: WorkerEpoch | None = None
        self._weights: PreparedWeights | None = None
        self._receiver: WeightReceiver | None = None
        self._last_ended = -1
        self._numbers = itertools.count()
        self._takes: dict[int, tuple[RankProcess, int]] = {}
        """Keys that ranks wait for: our request ID -> the rank and its own ID."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()

    async def run(self) -> str:
        """Returns why it ended; empty: the root disconnected in order."""
        tasks = [
            asyncio.create_task(work)
            for work in (self._listen(), keep_alive(self._channel, self._heartbeat), self._check_ranks())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next((str(task.exception() or "") for task in tasks if task.done()), "")
        except asyncio.CancelledError:
            self._channel.post(messages.Goodbye(SHUTTING_DOWN))
            raise
        finally:
            await self._close(tasks)

    async def _close(self, tasks: list[asyncio.Task[None]]) -> None:
        everything = [*tasks, *self._tasks]
        for task in everything:
            task.cancel()
        await asyncio.gather(*everything, return_exceptions=True)
        await self._end_ranks()
        self._release_weights()
        self._channel.close()

    # --- messages of the root

    async def _listen(self) -> None:
        while not isinstance(message := await self._channel.receive(), messages.Goodbye):
            if isinstance(message, messages.PieceData | messages.PiecesEnd | messages.PiecesFailed):
                if self._receiver is not None and message.epoch == self._receiver.epoch:
                    await self._receiver.take(message)  # backpressure: waits while the disk is behind
            else:
                self._handle(message)

    def _handle(self, message: FromRoot) -> None:
        match message:
            case messages.ProbeRequest():
                self._run(self._probe())
            case messages.PrepareWeights():
                self._stop_receiving()
                self._run(self._prepare(message))
            case messages.StartRanks():
                self._run(self._start(message))
            case messages.EndEpoch():
                self._last_ended = max(self._last_ended, message.epoch)
                self._stop_receiving()
                self._run(self._end(message.epoch))
            case messages.EpochKeyFound():
                self._answer(message.id, lambda number: KeyFound(number, message.value))
            case messages.EpochKeyMissing():
                self._answer(message.id, lambda number: KeyMissing(number, message.reason))
            case messages.HeartbeatsRequest():
                self._run(self._send_heartbeats(message.id))
            case _:  # a heartbeat
                pass

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.line(f"internal error, {type(error).__name__}: {error}; disconnecting")
            self._channel.close()

    async def _probe(self) -> None:
        """After ranks that are being ended have freed their memory."""
        async with self._lock:
            self._channel.post(await asyncio.to_thread(probe_answer, self._config.device, self._address))

    # --- weights

    async def _prepare(self, prepare: messages.PrepareWeights) -> None:
        async with self._lock:
            await self._end_ranks()
            self._release_weights()
            if prepare.epoch <= self._last_ended:
                return
            assert self._config.cache is not None, "the root's own machine reads its own files"
            self._receiver = WeightReceiver(prepare, self._channel, self._log)
            try:
                self._weights = await self._receiver.run(self._config.cache, self._config.local)
                self._channel.post(
                    messages.WeightsPrepared(prepare.epoch, self._weights.held_bytes, self._weights.received_bytes)
                )
            except Error as error:
                self._log.line(f"epoch {prepare.epoch} cannot be prepared: {error}")
                self._channel.post(messages.PrepareFailed(prepare.epoch, str(error)))
            finally:
                self._receiver.stop()  # `take` may be waiting for room in the queue
                self._receiver = None

    def _stop_receiving(self) -> None:
        if self._receiver is not None:
            self._receiver.stop()

    def _release_weights(self) -> None:
        if self._weights is not None:
            self._weights.close()
        self._weights = None

    # --- ranks

    async def _start(self, start: messages.StartRanks) -> None:
        async with self._lock:
            await self._end_ranks()
            if start.epoch <= self._last_ended or not start.jobs:
                return
            epoch = self._epoch = WorkerEpoch(start.epoch, start.jobs[0].launch.layout.world)
            for job in start.jobs:
                await self._start_one(epoch, self._complete_job(job))
            self._log.line(f"{epoch.name}: started")
            self._channel.post(messages.RanksStarted(epoch.number, [process.pid for process in epoch.processes.values()]))

    async def _start_one(self, epoch: WorkerEpoch, job: RankJob) -> None:
        assert job.meeting is not None
        machines, rank = job.meeting.machines, job.rank
        try:
            process = epoch.processes[rank] = RankProcess(
                job,
                max(_cores() // max(machines.count(machines[rank]), 1), 1),
                lambda message: self._on_rank_message(epoch, rank, message),
                lambda failed: self._rank_ended(epoch, rank, failed),
            )
            await process.start()
        except OSError as error:  # out of processes or file descriptors
            if (started := epoch.processes.pop(rank, None)) is not None:
                await started.close()
            self._rank_ended(epoch, rank, EngineFailed("", f"could not be started: {error.strerror or error}"))

    def _complete_job(self, job: RankJob) -> RankJob:
        """Fills in what only this machine knows: its weights and device. Unmasks the key."""
        assert job.meeting is not None, "several ranks have a rendezvous"
        key = self._channel.mask_key(job.meeting.key, messages.key_name(job.epoch))
        job = msgspec.structs.replace(job, meeting=msgspec.structs.replace(job.meeting, key=key))
        if self._config.cache is None:
            return job
        weights = self._weights or PreparedWeights()
        launch = msgspec.structs.replace(job.launch, model=weights.model or job.launch.model, device=self._config.device)
        return msgspec.structs.replace(job, launch=launch, slices_folder=weights.folder)

    async def _end(self, number: int) -> None:
        async with self._lock:
            if self._epoch is not None and self._epoch.number <= number:
                await self._end_ranks()
            self._channel.post(messages.EpochEnded(number))

    async def _end_ranks(self) -> None:
        epoch = self._epoch
        if epoch is None:
            return
        # Forgotten only when all are gone: whoever is cancelled here leaves the rest to the next call.
        await asyncio.gather(*(process.close() for process in epoch.processes.values()))
        self._epoch = None
        self._takes.clear()
        seconds = time.monotonic() - epoch.began
        self._log.line(f"{epoch.name}: ended after {seconds:.0f} s, {epoch.rows:,} tokens")

    def _on_rank_message(self, epoch: WorkerEpoch, rank: int, message: FromRank) -> None:
        process = epoch.processes[rank]
        match message:
            case PutKey():
                self._channel.post(messages.PutEpochKey(epoch.number, message.key, message.value))
            case TakeKey():
                number = next(self._numbers)
                self._takes[number] = process, message.id
                self._channel.post(messages.TakeEpochKey(epoch.number, number, message.key, message.timeout_seconds))
            case LoadProgress():
                epoch.loading[rank] = message
                self._channel.post(messages.TransferProgress(epoch.number, message.done_bytes, message.total_bytes, rank))
            case RankBuilt():
                epoch.ready.add(rank)
                self._channel.post(messages.RankReady(epoch.number, rank, message.weights_bytes))
                if epoch.ready == epoch.processes.keys():
                    self._log.line(f"{epoch.name}: ready after {time.monotonic() - epoch.began:.1f} s")
            case _:
                pass

    def _rank_ended(self, epoch: WorkerEpoch, rank: int, failed: EngineFailed) -> None:
        if epoch is self._epoch:
            self._log.line(f"epoch {epoch.number}: rank {rank} {_as_clause(failed)}")
            self._channel.post(messages.RankEnded(epoch.number, rank, failed.kind, failed.message, failed.short_bytes))

    def _answer(self, number: int, make: Callable[[int], KeyFound | KeyMissing]) -> None:
        waiting = self._takes.pop(number, None)
        if waiting is not None:
            process, theirs = waiting
            process.send(make(theirs))

    # --- heartbeats

    def _heartbeat(self) -> messages.Heartbeat:
        processes = self._epoch.processes.values() if self._epoch is not None else ()
        return messages.Heartbeat([messages.RankReport(process.rank, process.heartbeat) for process in processes])

    async def _send_heartbeats(self, number: int) -> None:
        processes = list(self._epoch.processes.values()) if self._epoch is not None else []
        heartbeats = await asyncio.gather(*(process.fresh_heartbeat() for process in processes))
        done = [messages.RankReport(process.rank, heartbeat) for process, heartbeat in zip(processes, heartbeats, strict=True)]
        self._channel.post(messages.Heartbeats(number, done))

    async def _check_ranks(self) -> None:
        """Twice a second: kills stuck ranks, shows the status."""
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_CHECKS)
            epoch, now = self._epoch, time.monotonic()
            if epoch is None:
                continue
            for process in epoch.processes.values():
                process.check(now)
            if now - epoch.last[0] >= SECONDS_BETWEEN_STATUS:
                self._log.show_status(epoch.status(now))


def _as_clause(failed: EngineFailed) -> str:
    return failed.message if not failed.kind or failed.kind == "Stuck" else f"failed: {failed.message}"


def _cores() -> int:
    """Cores to divide among ranks: WINDLASS_THREADS, else all."""
    with suppress(ValueError, KeyError):
        return max(int(os.environ["WINDLASS_THREADS"]), 1)
    return this_system().num_cores
