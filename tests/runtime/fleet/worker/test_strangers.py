"""A thousand strangers at every port that a worker and its ranks open, while they work: nobody notices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.cpu, pytest.mark.multi]

pytest.importorskip("torch")

from small_root import SmallRoot, WorkerProcess, generated  # noqa: E402
from strangers import (  # noqa: E402
    AT_A_MEETING,
    AT_THE_DOOR,
    another_root,
    attack,
    chosen,
    listening_ports,
    num_descriptors,
    resident_bytes,
)

from waiting import HUNG_SECONDS, until  # noqa: E402
from windlass.core.layout import Layout  # noqa: E402
from windlass.runtime.fleet.protocol.messages import EndEpoch, EpochEnded, RankEnded, RanksStarted  # noqa: E402
from windlass.runtime.fleet.worker.connection_limiter import MAX_HALF_OPEN  # noqa: E402

THOUSAND = 1000
PROMPT, COUNT = [1, 2, 3], 16
GROWTH_BYTES = 4 * 2**20


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    found = WorkerProcess(tmp_path_factory.mktemp("worker"), beat_seconds=HUNG_SECONDS)
    yield found
    found.close()


class Working:
    """A root's engine that goes on and on, in a thread; what it says is checked."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._wanted = engine, generated(engine, PROMPT, COUNT)
        self._ending = threading.Event()
        self.rounds, self.problem = 0, ""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                assert generated(self._engine, PROMPT, COUNT) == self._wanted
                self.rounds += 1
        except BaseException as error:  # noqa: BLE001 - told by the test
            self.problem = f"{type(error).__name__}: {error}"

    def end(self) -> None:
        self._ending.set()
        self._thread.join()


def both_listen(pids: list[int]) -> list[int]:
    found = [port for pid in pids for port in listening_ports(pid)]
    return found if len(found) == len(pids) else []


def test_a_thousand_strangers_at_every_port(worker: WorkerProcess) -> None:
    root = SmallRoot(worker.port)
    try:
        # While ranks meet: those of the worker listen, and cannot go on before the first rank comes.
        job = root.start(1, Layout(tp=3), transport="links")
        pids = root.wait(RanksStarted).pids
        ports = until(lambda: both_listen(pids))
        for port in ports:
            attack(port, chosen(AT_A_MEETING, THOUSAND // 2))
        # They go on while the first rank comes, and all of them meet.
        still = threading.Thread(target=lambda: [attack(port, chosen(AT_A_MEETING, THOUSAND // 2)) for port in ports])
        still.start()
        engine = root.engine(job)
        still.join()
        working = Working(engine)
        try:
            assert listening_ports(worker.pid) == {worker.port}
            assert [listening_ports(pid) for pid in pids] == [set(), set()], "nothing listens but while ranks meet"
            calm, before = num_descriptors(worker.pid), 0
            for number in range(THOUSAND // 250):
                assert attack(worker.port, chosen(AT_THE_DOOR, 250), HUNG_SECONDS) == 250
                until(lambda: num_descriptors(worker.pid) <= calm, "the end of the last stranger")
                if not number:  # what it takes once, it may keep
                    before, rounds = resident_bytes(worker.pid), working.rounds
            attack(worker.port, [another_root] * 10, HUNG_SECONDS)
            until(lambda: num_descriptors(worker.pid) <= calm, "the end of the last stranger")
            assert resident_bytes(worker.pid) < before + GROWTH_BYTES
            until(lambda: working.rounds > rounds or working.problem, "another answer")
        finally:
            working.end()
        assert not working.problem and not root.lost
        assert not [one for one in root.heard if isinstance(one, RankEnded)]
        assert sum("refused" in line for line in worker.lines()) < 60, "a log is not theirs to fill"
        assert not [line for line in worker.lines() if "mistake" in line or "Error" in line]
        root.post(EndEpoch(1))
        root.wait(EpochEnded)
        engine.close()
    finally:
        root.close()


def test_gloo_listens_on_and_hears_nobody(worker: WorkerProcess) -> None:
    """Where ranks talk by torch.distributed, its own listener lives as long as a group."""
    root = SmallRoot(worker.port)
    try:
        engine = root.engine(root.start(1, Layout(tp=2), transport="gloo"))
        wanted = generated(engine, PROMPT, COUNT)
        (pid,) = worker.ranks()
        ports, before = listening_ports(pid), num_descriptors(pid)
        assert len(ports) == 1, "if gloo does not listen any more, shut.py is of no use"
        assert sum(attack(port, chosen(AT_A_MEETING, 200)) for port in ports) == 0
        assert num_descriptors(pid) == before
        assert generated(engine, PROMPT, COUNT) == wanted
        engine.close()
    finally:
        root.close()


def test_a_root_gets_in_while_strangers_hold_the_door(tmp_path: Path) -> None:
    """More than there is room for, all of which stay as long as they can: for ever, as this worker has all the patience there is."""
    worker = WorkerProcess(tmp_path, proof_seconds=24 * 3600.0)
    ending = threading.Event()
    calm = num_descriptors(worker.pid)

    def hold(connection: Any) -> None:
        ending.wait()

    strangers = threading.Thread(
        target=attack, args=(worker.port, [hold] * 3 * MAX_HALF_OPEN, HUNG_SECONDS, 3 * MAX_HALF_OPEN), daemon=True
    )
    strangers.start()
    try:
        until(lambda: any("too many unauthenticated connections" in line for line in worker.lines()))
        assert num_descriptors(worker.pid) >= calm + MAX_HALF_OPEN, "there is no room left"
        SmallRoot(worker.port).close()
    finally:
        ending.set()
        strangers.join()
        worker.close()
