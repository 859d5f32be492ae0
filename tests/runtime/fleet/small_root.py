"""A root of a few lines, for tests of workers: an event loop in a thread, and the first rank in the test's own process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Coroutine, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from subprocesses import children
from waiting import HUNG_SECONDS, until
from windlass.core.launch import Launch, RandomInit, RankJob
from windlass.core.layout import Layout
from windlass.core.ranks.rendezvous import Meeting
from windlass.core.request import GREEDY
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.engine.ranks.messages import HEARTBEAT_TIMEOUT_SECONDS
from windlass.runtime.fleet.protocol.channel import HANDSHAKE_SECONDS, Channel, ChannelLost, dial, keep_alive
from windlass.runtime.fleet.protocol.messages import (
    FromRoot,
    FromWorker,
    Join,
    PutEpochKey,
    RankEnded,
    StartRanks,
    TakeEpochKey,
    key_name,
)
from windlass.runtime.fleet.root.store import EpochStore, StoreClosed

CONFIG = json.loads((Path(__file__).parents[2] / "model" / "families" / "tiny" / "llama.json").read_text())
SECRET = b"sixteen bytes are enough"

PATIENT = """
import signal
import windlass.cli
from windlass.runtime.fleet.protocol import channel
from windlass.runtime.fleet.worker import rank_processes as ranks, worker
worker.HANDSHAKE_SECONDS, patience = {}, {}
silence = channel.SILENCE_TIMEOUT_SECONDS

def wait_for_signs_of_life(of_ranks, of_root):
    ranks.HEARTBEAT_TIMEOUT_SECONDS, channel.SILENCE_TIMEOUT_SECONDS = of_ranks, of_root

wait_for_signs_of_life(patience, silence)
signal.signal(signal.SIGUSR1, lambda *_: wait_for_signs_of_life(0.5, silence))
signal.signal(signal.SIGUSR2, lambda *_: wait_for_signs_of_life(patience, 0.5))
signal.signal(signal.SIGWINCH, lambda *_: wait_for_signs_of_life(patience, silence))
windlass.cli.main()
"""

OF_RANKS, OF_ROOT = signal.SIGUSR1, signal.SIGUSR2
"""Told to such a worker: whose silence it is not to bear."""

Kind = TypeVar("Kind")


def tiny(layout: Layout) -> Launch:
    random = RandomInit(config=CONFIG, scheme="bf16")
    return Launch(model="tiny", device="cpu", context_tokens=64, random_weights=random, layout=layout, kv_bytes=2**22)


# --- a worker, as users start it


class WorkerProcess:
    def __init__(
        self, folder: Path, *options: str, proof_seconds: float | None = None, beat_seconds: float | None = None
    ) -> None:
        """In place of the worker's own: seconds for whoever knocks to prove what it is, and for a rank to give a sign of life. On a machine
        that does much else, a rank that imports torch gives none for long."""
        secret = folder / "secret"
        secret.write_bytes(SECRET)
        secret.chmod(0o600)
        self.log = folder / "log"
        is_usual = proof_seconds is None and beat_seconds is None
        patient = PATIENT.format(proof_seconds or HANDSHAKE_SECONDS, beat_seconds or HEARTBEAT_TIMEOUT_SECONDS)
        program = ["-m", "windlass"] if is_usual else ["-c", patient]
        command = [sys.executable, *program, "worker", "--listen", "127.0.0.1:0", "--secret-file", str(secret)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WINDLASS_THREADS": "1"}
        with self.log.open("wb") as words:
            self.process = subprocess.Popen(
                [*command, "--cache", str(folder / "cache"), *options], stderr=words, stdin=subprocess.DEVNULL, env=environment
            )
        self.port = int(until(self._address).rpartition(":")[2])

    def _address(self) -> str:
        found = [line for line in self.lines() if " listens at " in line]
        assert self.process.poll() is None, self.lines()
        return found[0].split(" listens at ")[1].split(";")[0] if found else ""

    @property
    def pid(self) -> int:
        return self.process.pid

    @contextmanager
    def impatient(self, who: signal.Signals) -> Generator[None]:
        """Half a second of silence is enough, now that somebody was made to fall silent. For a worker that was given seconds."""
        self.process.send_signal(who)
        yield
        self.process.send_signal(signal.SIGWINCH)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    @property
    def is_free(self) -> bool:
        """Every root that has joined is gone, by its own words: the next is not told that it is busy."""
        lines = self.lines()
        return sum(line.endswith(" joined") for line in lines) == sum(
            line.endswith("; waiting for a root") and " listens at " not in line for line in lines
        )

    def ranks(self) -> list[int]:
        """Processes it has started."""
        return children(self.pid, "windlass.runtime.engine.ranks.follower")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


# --- a root


class SmallRoot:
    """What came from the worker is in `heard`, in order."""

    def __init__(self, port: int, secret: bytes = SECRET, name: str = "test", root: bytes = b"") -> None:
        self.heard: list[FromWorker] = []
        self.lost = ""
        self.is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks: list[Future[None]] = []
        self.board: EpochStore = EpochStore()
        try:
            self.channel: Channel[FromRoot, FromWorker] = self.call(dial("127.0.0.1", port, secret, HUNG_SECONDS))
            self.post(Join(root or os.urandom(16), name))
        except BaseException:
            self._end_loop()
            raise
        self._tasks = [asyncio.run_coroutine_threadsafe(work, self._loop) for work in (self._listen(), self._live())]

    def call(self, work: Coroutine[Any, Any, Kind], seconds: float = HUNG_SECONDS) -> Kind:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def post(self, message: FromRoot) -> None:
        self._loop.call_soon_threadsafe(self.channel.post, message)

    def wait(self, kind: type[Kind], since: int = 0) -> Kind:
        """The first of its kind among what was heard after `since` messages."""
        return until(lambda: next((one for one in self.heard[since:] if isinstance(one, kind)), None), kind.__name__)

    async def _listen(self) -> None:
        try:
            while True:
                message = await self.channel.receive()
                if isinstance(message, PutEpochKey | TakeEpochKey):
                    self.board.handle(message, self.channel.post)
                self.heard.append(message)
                if isinstance(message, RankEnded):  # whoever waits for it waits in vain
                    self.board.close(f"rank {message.rank} ended: {message.reason}")
        except ChannelLost as error:
            self.lost = str(error) or "lost"

    async def _live(self) -> None:
        try:
            await keep_alive(self.channel)
        except ChannelLost as error:
            self.lost = str(error)

    def fall_silent(self) -> None:
        """It is there, takes what comes, and says nothing more."""
        self._tasks[1].cancel()

    def close(self) -> None:
        self.is_closed = True
        self.call(self._close())
        self._end_loop()

    async def _close(self) -> None:
        self.board.close()
        self.channel.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for _ in range(3):  # turns in which the transport says goodbye
            await asyncio.sleep(0)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- an epoch

    def start(self, epoch: int, layout: Layout, transport: str = "auto", launch: Launch | None = None) -> RankJob:
        """All ranks but the first at the worker; the first's own job."""
        self.board = EpochStore()
        world = layout.world
        hosts, machines = ("127.0.0.1",) * world, (0, *(1,) * (world - 1))
        meeting = Meeting(key=os.urandom(32), hosts=hosts, machines=machines, transport=transport)
        jobs = [RankJob(launch=launch or tiny(layout), rank=rank, meeting=meeting, epoch=epoch) for rank in range(world)]
        covered = msgspec.structs.replace(meeting, key=self.channel.mask_key(meeting.key, key_name(epoch)))
        self.post(StartRanks(epoch, [msgspec.structs.replace(job, meeting=covered) for job in jobs[1:]]))
        return jobs[0]

    def engine(self, job: RankJob) -> Any:
        """The first rank, here."""
        from windlass.runtime.engine.load import make_engine
        from windlass.runtime.engine.ranks.broadcast import StepBroadcast, broadcast_steps
        from windlass.runtime.engine.ranks.first import LIMITS_KEY, build_rank

        notes, steps = _Notes(self), StepBroadcast()
        built = build_rank(job, notes)
        weakref.finalize(built.decoder, steps.close)
        weakref.finalize(built.decoder, built.decoder.shard.groups.close)
        broadcast_steps(built.decoder, steps, timed=True)
        engine = make_engine(job.launch, built.decoder, built.device)
        notes.put(LIMITS_KEY, msgspec.msgpack.encode(engine.limits))
        assert job.meeting is not None
        steps.connect(job.rank, job.meeting, notes)
        return engine


class _Notes:
    """The root's board, for the first rank, which is in another thread."""

    def __init__(self, root: SmallRoot) -> None:
        self._root, self._board = root, root.board

    def put(self, key: str, value: bytes) -> None:
        async def put() -> None:
            self._board.put(key, value)

        self._root.call(put())

    def take(self, key: str, timeout_seconds: float) -> bytes:
        from windlass.runtime.parallel.group import GroupLost

        try:
            return self._root.call(self._board.take(key, timeout_seconds), timeout_seconds + HUNG_SECONDS)
        except StoreClosed as error:
            raise GroupLost(str(error)) from error


def generated(engine: Any, prompt: list[int], count: int) -> list[int]:
    found: list[int] = []
    engine.submit(Submit(1, prompt, GREEDY, count))
    while engine.has_work:
        for output in engine.step():
            found += output.token_ids
    return found
