"""A supervisor to which something happens that nobody wants: it goes on listening, says what it was, and leaves nothing behind. No torch."""

from __future__ import annotations

import asyncio
import errno
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

import owned_time
from waiting import HUNG_SECONDS
from windlass.core.launch import Launch, RankJob
from windlass.core.layout import Layout
from windlass.core.ranks.epoch import EpochPlan
from windlass.core.ranks.rendezvous import KEY_BYTES, Meeting
from windlass.runtime.engine.ranks.messages import HEARTBEAT_INTERVAL_SECONDS, RankHeartbeat, framed
from windlass.runtime.fleet.protocol.channel import accept
from windlass.runtime.fleet.protocol.messages import (
    FromRoot,
    FromWorker,
    Heartbeats,
    HeartbeatsRequest,
    Joined,
    PieceData,
    PiecesRequest,
    PrepareFailed,
    PrepareWeights,
    RankEnded,
    StartRanks,
)
from windlass.runtime.fleet.root.loopback import MemoryChannel, NullLog
from windlass.runtime.fleet.root.root import Fleet
from windlass.runtime.fleet.transfer.cache import WeightCache
from windlass.runtime.fleet.worker import rank_processes as ranks
from windlass.runtime.fleet.worker import session as session_module
from windlass.runtime.fleet.worker.config import WorkerConfig
from windlass.runtime.fleet.worker.session import Session
from windlass.runtime.weights.tensors.slices import Slice
from windlass.runtime.weights.transfer.pieces import Catalogue, CheckpointPiece, TensorHeader

pytestmark = pytest.mark.cpu

SECRET = b"a secret of many bytes"
WHOLE = Slice(name="matrix", rows=(0, 64), columns=(0, 64))
CATALOGUE = Catalogue(
    key="checkpoint", name="tiny", config={}, kind="hf", tensors=(TensorHeader(name="matrix", dtype="U8", shape=(64, 64)),)
)


class Root:
    """The other end of a session's wire."""

    def __init__(self, equipment: WorkerConfig) -> None:
        there: asyncio.Queue[FromRoot | None] = asyncio.Queue()
        here: asyncio.Queue[FromWorker | None] = asyncio.Queue()
        self.wire: MemoryChannel[FromRoot, FromWorker] = MemoryChannel(here, there)
        session = Session(MemoryChannel(there, here), equipment, NullLog())
        self.running = asyncio.get_running_loop().create_task(session.run())

    async def wait(self, kind: type) -> Any:
        async with asyncio.timeout(HUNG_SECONDS):
            while not isinstance(message := await self.wire.receive(), kind):
                pass
        return message

    async def close(self) -> None:
        self.wire.close()
        await asyncio.wait_for(self.running, HUNG_SECONDS)


def start() -> StartRanks:
    meeting = Meeting(key=bytes(KEY_BYTES), hosts=("", ""), machines=(0, 0))
    return StartRanks(1, [RankJob(launch=Launch(model="none", layout=Layout(tp=2)), rank=1, meeting=meeting)])


def test_a_piece_that_cannot_be_kept_does_not_stop_it_from_listening(tmp_path: Path) -> None:
    """Many more are on their way: nobody takes them any more."""

    async def happen() -> None:
        root = Root(WorkerConfig(cache=WeightCache(tmp_path)))
        root.wire.post(PrepareWeights(1, CATALOGUE, "other contents", "", [WHOLE]))
        await root.wait(PiecesRequest)
        damaged = CheckpointPiece(slices=(WHOLE,), data=bytes(64 * 64), checksum=b"")
        for _ in range(30):
            root.wire.post(PieceData(1, damaged))
        root.wire.post(HeartbeatsRequest(7))
        assert "checksum" in (await root.wait(PrepareFailed)).reason
        assert (await root.wait(Heartbeats)).id == 7
        await root.close()

    asyncio.run(happen())


def test_a_rank_that_cannot_be_started_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def happen() -> None:
        root = Root(WorkerConfig())
        with monkeypatch.context() as patch:
            patch.setattr(tempfile, "TemporaryFile", none)
            root.wire.post(start())
            ended = await root.wait(RankEnded)
        assert ended.rank == 1 and "could not be started: No space left on device" in ended.reason
        root.wire.post(HeartbeatsRequest(7))
        assert (await root.wait(Heartbeats)).ranks == []
        await root.close()

    asyncio.run(happen())


def test_a_rank_that_is_only_half_started_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root goes in that very moment."""
    started: list[Any] = []

    async def never(connection: socket.socket, *_: Any) -> None:
        with connection:
            await asyncio.Event().wait()

    def start_rank(*given: Any) -> Any:
        started.append(found := made(*given))
        return found

    async def happen() -> None:
        root = Root(WorkerConfig())
        root.wire.post(start())
        async with asyncio.timeout(HUNG_SECONDS):
            while not started:
                await asyncio.sleep(0.01)
        await root.close()

    made = ranks.start_rank
    monkeypatch.setattr(ranks, "start_rank", start_rank)
    monkeypatch.setattr(ranks, "connect_rank", never)
    asyncio.run(happen())
    assert started[0][0].returncode is not None, "it is gone, and somebody saw it go"


class Beating:
    """A process in name only: it beats twice a second until it stands still, and ends when it is killed."""

    pid, returncode = 1, None

    def __init__(self, stops: float) -> None:
        self._line, self.theirs = socket.socketpair()
        self._beating = asyncio.get_running_loop().create_task(self._beat(stops))

    async def _beat(self, stops: float) -> None:
        while asyncio.get_running_loop().time() <= stops:
            self._line.sendall(framed(RankHeartbeat()))
            await asyncio.sleep(HEARTBEAT_INTERVAL_SECONDS)

    def kill(self) -> None:
        self.returncode = -9
        self._line.close()

    def wait(self, _: float = 0.0) -> None: ...


def test_a_rank_that_stands_still_is_missed_within_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own. One that beats is not, for ten minutes."""

    async def happen() -> None:
        rank = Beating(stops=600.0)
        monkeypatch.setattr(ranks, "start_rank", lambda *_: (rank, rank.theirs))
        root = Root(WorkerConfig())
        root.wire.post(start())
        while not isinstance(ended := await root.wire.receive(), RankEnded):
            pass
        assert ended.kind == "Stuck" and "no heartbeat for 4." in ended.reason
        assert 600.0 < asyncio.get_running_loop().time() < 605.0 and rank.returncode
        await root.close()

    for module in (ranks, session_module):
        monkeypatch.setattr(module, "time", owned_time.clock())
    owned_time.run(happen())


def test_a_rank_that_ended_by_itself_leaves_no_open_file_and_closing_it_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that ends cancels whoever is ending its ranks, and then ends them itself."""

    async def happen() -> None:
        waited = threading.Event()
        rank, ends = Beating(stops=0.0), list[Any]()
        monkeypatch.setattr(rank, "wait", lambda *_: waited.wait(HUNG_SECONDS))
        monkeypatch.setattr(ranks, "start_rank", lambda *_: (rank, rank.theirs))
        process = ranks.RankProcess(RankJob(launch=Launch(model="none")), 1, lambda _: None, ends.append)
        await process.start()
        rank.kill()
        while process._reaping is None:
            await asyncio.sleep(0)
        for _ in range(2):
            closing = asyncio.create_task(process.close())
            await asyncio.sleep(0)
            closing.cancel()
            await asyncio.wait([closing])
            assert closing.cancelled() and not process._reaping.done()
        waited.set()
        await process.close()
        assert process._output.closed and not ends

        rank = Beating(stops=0.0)
        alone = ranks.RankProcess(RankJob(launch=Launch(model="none")), 1, lambda _: None, ends.append)
        await alone.start()
        rank.kill()
        while not ends:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert alone._output.closed and "SIGKILL" in ends[0].message

    asyncio.run(happen())


def test_a_worker_that_goes_while_it_is_asked_what_it_has_is_called_again() -> None:
    calls = 0

    async def answer(listening: socket.socket) -> None:
        nonlocal calls
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listening)
            channel = await accept(connection, SECRET)
            await channel.receive()
            channel.post(Joined("there"))
            await channel.receive()
            channel.close()
            calls += 1

    def replan(_: Any) -> EpochPlan:
        raise AssertionError("nobody is here to plan with")

    async def happen() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            answering = asyncio.create_task(answer(listening))
            fleet = Fleet(Launch(model="none", workers=(f"127.0.0.1:{listening.getsockname()[1]}",)), replan, SECRET)
            fleet.transport().open(lambda _: None, lambda _: None)
            async with asyncio.timeout(HUNG_SECONDS):
                while calls < 2:
                    await asyncio.sleep(0.05)
            await fleet.close()
            answering.cancel()

    asyncio.run(happen())
