"""A worker as users start it: it does its part, and leaves no rank behind, whoever dies and however."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.multi]

pytest.importorskip("torch")

from small_root import CONFIG, OF_RANKS, OF_ROOT, SmallRoot, WorkerProcess, generated, tiny  # noqa: E402

from subprocesses import is_running, started, until_gone  # noqa: E402
from waiting import HUNG_SECONDS, until  # noqa: E402
from windlass.core.launch import Launch, RankJob  # noqa: E402
from windlass.core.layout import Layout  # noqa: E402
from windlass.core.ranks.epoch import EpochPlan  # noqa: E402
from windlass.core.ranks.rendezvous import Meeting  # noqa: E402
from windlass.core.rule import stored_tensors  # noqa: E402
from windlass.model.families import describe, rules  # noqa: E402
from windlass.runtime.engine.load import load_model  # noqa: E402
from windlass.runtime.fleet.protocol import channel  # noqa: E402
from windlass.runtime.fleet.protocol.handshake import NotAdmitted  # noqa: E402
from windlass.runtime.fleet.protocol.messages import (  # noqa: E402
    EndEpoch,
    EpochEnded,
    Goodbye,
    Heartbeat,
    Heartbeats,
    HeartbeatsRequest,
    Joined,
    PieceData,
    PiecesEnd,
    PiecesFailed,
    PiecesRequest,
    PrepareFailed,
    PrepareWeights,
    ProbeAnswer,
    ProbeRequest,
    RankEnded,
    RankReady,
    RanksStarted,
    StartRanks,
    WeightsPrepared,
    WorkerBusy,
)
from windlass.runtime.fleet.root.loopback import LoopbackMachine  # noqa: E402
from windlass.runtime.fleet.transfer import send as sending_module  # noqa: E402
from windlass.runtime.fleet.transfer.send import CheckpointSender  # noqa: E402
from windlass.runtime.kernels.program import program  # noqa: E402
from windlass.runtime.parallel.group import GroupLost  # noqa: E402


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    found = WorkerProcess(tmp_path_factory.mktemp("worker"), beat_seconds=HUNG_SECONDS)
    try:
        yield found
        assert found.process.poll() is None, f"it should outlive all tests: {found.lines()}"
    finally:
        found.close()


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Splitting shares the cores out."""
    yield
    if program.available():
        program.set_threads(program.num_threads())


@pytest.fixture
def roots(worker: WorkerProcess) -> Iterator[Any]:
    made: list[SmallRoot] = []

    def make(**how: Any) -> SmallRoot:
        made.append(SmallRoot(worker.port, **how))
        return made[-1]

    yield make
    for root in made:
        if not root.is_closed:
            root.close()
    until(lambda: worker.is_free, "the end of the last root")
    until_gone(*worker.ranks())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny one."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    chance = torch.Generator().manual_seed(0)
    stored = stored_tensors(rules(describe(CONFIG)))
    tensors = {one.name: torch.randn(one.shape, generator=chance).to(torch.bfloat16) for one in stored}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def launch(checkpoint: Path) -> Launch:
    """In fp32, so that it does not matter in which order ranks add."""
    return Launch(model=str(checkpoint), device="cpu", kv="fp32", exact=True, context_tokens=64, kv_bytes=2**22)


@pytest.fixture(scope="module")
def alone(launch: Launch) -> list[int]:
    """What one engine says after [1, 2, 3]."""
    engine, _ = load_model(launch)
    try:
        return generated(engine, [1, 2, 3], 12)
    finally:
        engine.close()


def _with_steps(root: Any, epoch: int, count: int) -> Any:
    """Of the one rank, once it has counted so many: the root may have a step's logits before the rank has counted the step."""
    since = len(root.heard)
    root.post(HeartbeatsRequest(epoch))
    (rank,) = root.wait(Heartbeats, since=since).ranks
    return rank if rank.heartbeat.steps >= count else None


def test_a_root_gets_its_part_done_epoch_after_epoch(worker: WorkerProcess, roots: Any, launch: Launch, alone: list[int]) -> None:
    root = roots()
    assert root.wait(Joined).name
    root.post(ProbeRequest())
    probed = root.wait(ProbeAnswer)
    assert probed.address == "127.0.0.1" and probed.num_cores >= 1 and probed.free_bytes > 2**20 and probed.bandwidth > 1e8
    for epoch, layout in ((1, Layout(tp=2)), (2, Layout(pp=2))):
        since = len(root.heard)
        engine = root.engine(root.start(epoch, layout, launch=msgspec.structs.replace(launch, layout=layout)))
        pids = root.wait(RanksStarted, since=since).pids
        assert worker.ranks() == pids and root.wait(RankReady, since=since).rank == 1
        found = generated(engine, [1, 2, 3], 12)
        rank = until(lambda root=root, epoch=epoch: _with_steps(root, epoch, 12))
        assert rank.rank == 1 and rank.heartbeat.rows == 3 + 11 and rank.heartbeat.steps == 12 and rank.heartbeat.step_seconds > 0
        assert sum(count.sent_bytes for count in rank.heartbeat.counts.values()) > 0
        root.post(EndEpoch(epoch))
        assert root.wait(EpochEnded, since=since).epoch == epoch
        assert not any(map(is_running, pids)), "ended means gone"
        engine.close()
        gc.collect()
        assert found == alone, layout
    assert not root.lost and not [one for one in root.heard if isinstance(one, RankEnded)]


@pytest.fixture
def sending(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointSender]:
    """The checkpoint in many pieces."""
    monkeypatch.setattr(sending_module, "PIECE_BYTES", 2_000)
    made = CheckpointSender(checkpoint)
    yield made
    made.close()


def test_weights_come_once_and_what_has_come_stays(
    worker: WorkerProcess, roots: Any, sending: CheckpointSender, launch: Launch, alone: list[int]
) -> None:
    """An epoch that is given up in the middle; the next asks for the rest, the one after for nothing."""
    root, layout = roots(), Layout(tp=2)
    slices = sending.needed(EpochPlan(layout=layout, nodes=(0, 1)), 1)

    def prepare(epoch: int) -> int:
        since = len(root.heard)
        root.post(PrepareWeights(epoch, sending.catalogue, "of no file here", "/nowhere", slices))
        return since

    wanted = root.wait(PiecesRequest, since=prepare(1)).slices
    pieces = list(sending.pieces(wanted))
    assert sending.num_bytes(wanted) == sending.num_bytes(slices) and len(pieces) > 4
    for piece in pieces[:2]:
        root.post(PieceData(1, piece))
    cache = worker.log.parent / "cache" / sending.catalogue.key
    until(lambda: len(list(cache.glob("*.piece"))) == 2)
    since = len(root.heard)
    root.post(EndEpoch(1))
    root.wait(EpochEnded, since=since)
    since = prepare(2)
    rest = root.wait(PiecesRequest, since=since).slices
    assert sending.num_bytes(rest) == sending.num_bytes(slices) - sum(len(piece.data) for piece in pieces[:2])
    for piece in sending.pieces(rest):
        root.post(PieceData(2, piece))
    root.post(PiecesEnd(2))
    prepared = root.wait(WeightsPrepared, since=since)
    assert prepared.held_bytes == sending.num_bytes(slices) and prepared.received_bytes == sending.num_bytes(rest)
    engine = root.engine(root.start(2, layout, launch=msgspec.structs.replace(launch, layout=layout)))
    found = generated(engine, [1, 2, 3], 12)
    engine.close()
    since = prepare(3)
    assert root.wait(WeightsPrepared, since=since).received_bytes == 0
    assert not [one for one in root.heard[since:] if isinstance(one, PiecesRequest)]
    assert found == alone


def test_weights_that_cannot_be_read_or_are_others_are_told_of(
    worker: WorkerProcess, roots: Any, sending: CheckpointSender
) -> None:
    root = roots()
    slices = sending.needed(EpochPlan(layout=Layout(pp=2), nodes=(0, 1)), 1)
    catalogue = msgspec.structs.replace(sending.catalogue, key="0" * 40)
    piece = next(iter(sending.pieces(slices)))
    damaged = msgspec.structs.replace(piece, data=bytes(len(piece.data)))
    answers = [PiecesFailed(1, "the disk is gone"), PieceData(2, damaged), PiecesEnd(3)]
    for epoch, (answer, words) in enumerate(zip(answers, ["the disk is gone", "checksum", "were not received"], strict=True), 1):
        since = len(root.heard)
        root.post(PrepareWeights(epoch, catalogue, "", "/nowhere", slices))
        root.wait(PiecesRequest, since=since)
        root.post(answer)
        assert words in root.wait(PrepareFailed, since=since).reason
    since = len(root.heard)
    root.post(PrepareWeights(4, msgspec.structs.replace(catalogue, key="../../escaped"), "", "/nowhere", slices))
    assert "not a valid checkpoint key" in root.wait(PrepareFailed, since=since).reason


def test_one_root_at_a_time_and_the_same_one_takes_its_own_place(worker: WorkerProcess, roots: Any) -> None:
    first = roots(name="alpha", root=b"a")
    first.wait(Joined)
    second = roots(name="beta", root=b"b")
    told = second.wait(WorkerBusy).reason
    assert told.startswith("busy with root alpha (127.0.0.1) since ")
    again = roots(name="alpha", root=b"a")
    again.wait(Joined)
    until(lambda: first.lost)
    again.post(Goodbye())
    until(lambda: again.lost)
    third = roots(name="beta", root=b"b")
    third.wait(Joined)
    assert not any("mistake" in line for line in worker.lines())


def test_a_rank_that_stands_still_is_found_and_ended(worker: WorkerProcess, roots: Any) -> None:
    """The worker tells of it, and so does whoever waits for the rank."""
    root = roots()
    engine = root.engine(root.start(1, Layout(tp=2)))
    (pid,) = worker.ranks()
    os.kill(pid, signal.SIGSTOP)
    with worker.impatient(OF_RANKS):
        ended = root.wait(RankEnded)
    assert (ended.kind, ended.rank, ended.epoch) == ("Stuck", 1, 1)
    assert "no heartbeat" in ended.reason and not is_running(pid)
    with pytest.raises(GroupLost):
        generated(engine, [1, 2, 3], 30)
    engine.close()


def test_a_rank_that_dies_is_told_of_at_once_and_a_silent_root_loses_its_ranks(worker: WorkerProcess, roots: Any) -> None:
    root = roots()
    root.start(1, Layout(tp=2))
    (pid,) = root.wait(RanksStarted).pids
    os.kill(pid, signal.SIGKILL)
    ended = root.wait(RankEnded)
    assert not ended.kind and "SIGKILL" in ended.reason, "it was seen to end, not missed after a while"
    since = len(root.heard)
    root.start(2, Layout(tp=2))  # it goes on
    (pid,) = root.wait(RanksStarted, since=since).pids
    root.fall_silent()
    with worker.impatient(OF_ROOT):
        until_gone(pid)
        until(lambda: any("no heartbeat" in line for line in worker.lines()))


def test_a_root_that_is_killed_leaves_nothing_and_the_next_is_welcome(worker: WorkerProcess, roots: Any) -> None:
    script = (
        "import time; from small_root import SmallRoot; from windlass.core.layout import Layout\n"
        "from windlass.runtime.fleet.protocol.messages import RanksStarted\n"
        f"root = SmallRoot({worker.port}); root.start(1, Layout(tp=2)); print(root.wait(RanksStarted).pids[0], flush=True); time.sleep(3600)"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [*map(str, (Path(__file__).parents[number] for number in (1, 3))), os.environ.get("PYTHONPATH", "")]
        ),
    }
    silences = sum("no heartbeat" in line for line in worker.lines())
    with started([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment) as killed:
        assert killed.stdout is not None
        pid = int(killed.stdout.readline())
        assert is_running(pid)
    until_gone(pid)
    until(lambda: worker.is_free, "the end of the root")
    assert sum("no heartbeat" in line for line in worker.lines()) == silences, "its end was seen, not missed after a while"
    roots().wait(Joined)


def test_a_worker_that_stood_still_is_missed_and_comes_back(
    worker: WorkerProcess, roots: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = roots(root=b"the same")
    root.start(1, Layout(tp=2))
    (pid,) = root.wait(RanksStarted).pids
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(channel, "SILENCE_TIMEOUT_SECONDS", 0.5)  # of this root: that it is four is in test_channel.py
            until(lambda: "no heartbeat" in root.lost)
        root.close()
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    until_gone(pid)
    again = roots(root=b"the same")
    again.wait(Joined)
    again.start(1, Layout(tp=2))
    again.wait(RanksStarted)


def test_another_secret_is_refused(worker: WorkerProcess, roots: Any) -> None:
    with pytest.raises(NotAdmitted, match="has another secret"):
        roots(secret=b"sixteen other bytes, and more")
    until(lambda: any("refused 127.0.0.1" in line and "secret" in line for line in worker.lines()))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_ranks_end_with_the_worker(tmp_path: Path, number: int, status: int) -> None:
    own = WorkerProcess(tmp_path)
    root = SmallRoot(own.port)
    try:
        root.start(1, Layout(tp=2))
        (pid,) = root.wait(RanksStarted).pids
        own.process.send_signal(number)
        assert own.process.wait(HUNG_SECONDS) == status
        until_gone(pid)
        until(lambda: root.lost)
        if not status:
            assert [one.reason for one in root.heard if isinstance(one, Goodbye)] == ["this worker is shutting down"]
            assert own.lines()[-1].endswith("ended")
    finally:
        root.close()
        own.close()


def test_the_roots_own_machine_speaks_the_same_words(tmp_path: Path) -> None:
    """No port, no secret; a rank that cannot be is told of, one that lives beats, and none is left."""

    async def run() -> list[int]:
        own = LoopbackMachine()
        meeting = Meeting(key=os.urandom(32), hosts=("", ""), machines=(0, 0))
        own.channel.post(StartRanks(1, [RankJob(launch=tiny(Layout(tp=2)), rank=1, meeting=meeting, epoch=1)]))
        pids, beats = list[int](), 0
        async with asyncio.timeout(HUNG_SECONDS):
            while not beats:
                message = await own.channel.receive()
                assert not isinstance(message, RankEnded), message
                pids += message.pids if isinstance(message, RanksStarted) else []
                beats += isinstance(message, Heartbeat) and bool(message.ranks)
        assert is_running(pids[0])
        await own.close()
        await own.close()
        return pids

    pids = asyncio.run(run())
    assert len(pids) == 1 and not is_running(pids[0])
