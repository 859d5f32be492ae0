"""Ranks that torchrun starts, all with the same words: the first is whatever program was asked for, the others follow its engine.

They meet through the store that torchrun keeps for them, which anybody who can reach its port can read: who is where, the job, and the key
with which ranks prove themselves to each other are there. A network that is not one's own is for workers (fleet/), which prove themselves
first. Nobody starts a rank again: when one is lost the run is over, and whether there is another is torchrun's to say.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.core.layout import Layout
from windlass.core.meeting import KEY_BYTES, Meeting
from windlass.core.model import Frozen
from windlass.engine.protocol import LOADER, Failed, Launch, Part
from windlass.engine.ranks import (
    SECONDS_TO_END,
    Found,
    NotFound,
    Put,
    RankJob,
    SaidToRank,
    Take,
    decode_said,
    framed,
    read_frame,
    start_rank,
)
from windlass.errors import BadInput, Impossible

if TYPE_CHECKING:
    from windlass.core.request import Info
    from windlass.engine.engine import Engine
    from windlass.engine.load import Progress

NAMES = ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
LOAD = f"{__name__}:load"
"""For Launch.loader: the first rank's engine, whose other ranks torchrun has started."""
SPOT, JOB, DONE = "spot", "job", "done"
SECONDS_TO_MEET = 120.0
SECONDS_TO_SAY_DONE = 15.0
SECONDS_BETWEEN_LOOKS = 0.1


class Started(Frozen):
    """What torchrun tells a process in its environment."""

    rank: int
    world: int
    node: int
    address: str
    port: int
    life: str = "0"
    """Of all processes together: another each time torchrun starts them anew."""


class Spot(Frozen):
    """Where a rank is."""

    node: int
    host: str


def started(environment: Mapping[str, str]) -> Started:
    missing = [name for name in NAMES if name not in environment]
    if missing:
        raise BadInput(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; start this with torchrun: "
            "torchrun --nproc-per-node 2 -m windlass.cli.torchrun run MODEL --prompt TEXT"
        )
    try:
        rank, world, node, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_PORT"))
    except ValueError as error:
        raise BadInput(f"torchrun's environment is not understood: {error}") from None
    life = f"{environment.get('TORCHELASTIC_RUN_ID', '')}.{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Started(rank=rank, world=world, node=node, address=environment["MASTER_ADDR"], port=port, life=life)


def layout_of(here: Started, asked: Layout) -> Layout:
    """All processes are used: for tp, unless more was asked for."""
    layout = asked if asked.world > 1 else msgspec.structs.replace(asked, tp=here.world)
    if layout.world != here.world:
        raise Impossible(
            f"--tp {layout.tp} --pp {layout.pp} is {layout.world} ranks, and torchrun started {here.world}; ask for as many, or for neither"
        )
    return layout


# --- the board


class StoreBoard:
    """Notes in torchrun's store."""

    def __init__(self, here: Started) -> None:
        from torch.distributed import PrefixStore, TCPStore

        waiting = timedelta(seconds=SECONDS_TO_MEET)
        store = TCPStore(here.address, here.port, is_master=False, wait_for_workers=False, timeout=waiting)
        self._store = PrefixStore(f"windlass {here.life}", store)

    def put(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # pyright: ignore[reportArgumentType] - bytes are taken as they are

    def take(self, key: str, timeout_seconds: float) -> bytes:
        from windlass.parallel.meeting import GroupLost

        try:
            self._store.wait([key], timedelta(seconds=timeout_seconds))
            return self._store.get(key)
        except RuntimeError as error:  # of which its time-outs and broken connections are
            raise GroupLost(f"no note {key!r} after {timeout_seconds:g} s: {str(error).splitlines()[0]}") from None

    def has(self, key: str) -> bool:
        return self._store.check([key])


def _relay(line: socket.socket, board: StoreBoard) -> Failed | None:
    """Does for a rank what a fleet would: its notes go to the board and come from there. To its end; its last words, if it had any."""
    failed = None
    while (data := read_frame(line)) is not None:
        said = decode_said(data)
        if isinstance(said, Put):
            board.put(said.key, said.value)
        elif isinstance(said, Take):
            line.sendall(framed(_answer(said, board)))
        elif isinstance(said, Failed):
            failed = said
    return failed


def _answer(asked: Take, board: StoreBoard) -> SaidToRank:
    from windlass.parallel.meeting import GroupLost

    try:
        return Found(asked.id, board.take(asked.key, asked.timeout_seconds))
    except GroupLost as error:
        return NotFound(asked.id, str(error))


# --- the first rank


def load(launch: Launch, progress: Progress | None = None) -> tuple[Engine, Info]:
    """In the engine's process, which has the environment of the program that started it."""
    from windlass.engine.load import load_model
    from windlass.engine.split import local_transport

    here = started(os.environ)
    board = StoreBoard(here)
    launch = msgspec.structs.replace(launch, loader=LOADER, layout=layout_of(here, launch.layout))
    meeting = _meeting([_spot(here), *_others(here, board)], local_transport(launch.device, here.world))
    board.put(JOB, msgspec.msgpack.encode(RankJob(launch=launch, rank=0, meeting=meeting)))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    threading.Thread(target=_relay, args=(ours, board), daemon=True).start()
    return load_model(msgspec.structs.replace(launch, part=Part(meeting=meeting, socket=theirs.detach())), progress)


def done(here: Started, status: int) -> None:
    """The others may go."""
    StoreBoard(here).put(DONE, str(status).encode())


def _others(here: Started, board: StoreBoard) -> list[Spot]:
    notes = (board.take(f"{SPOT}{rank}", SECONDS_TO_MEET) for rank in range(1, here.world))
    return [msgspec.msgpack.decode(note, type=Spot) for note in notes]


def _meeting(spots: list[Spot], transport: str) -> Meeting:
    """On one machine there is no need of a network."""
    nodes = tuple(spot.node for spot in spots)
    hosts = tuple(spot.host for spot in spots) if len(set(nodes)) > 1 else ("",) * len(spots)
    return Meeting(key=os.urandom(KEY_BYTES), hosts=hosts, machines=nodes, transport=transport)


def _spot(here: Started) -> Spot:
    """By the interface that leads to the others: no packet is sent for it."""
    with socket.socket(socket.AF_INET6 if ":" in here.address else socket.AF_INET, socket.SOCK_DGRAM) as probing:
        probing.connect((here.address, here.port))
        return Spot(node=here.node, host=probing.getsockname()[0])


# --- the others


def follow(here: Started) -> int:
    """To the end of the first rank's program; an exit status."""
    board = StoreBoard(here)
    board.put(f"{SPOT}{here.rank}", msgspec.msgpack.encode(_spot(here)))
    job = _job(here, board)
    if job is None:
        return 0
    with tempfile.TemporaryFile() as words:
        process, line = start_rank(1, words)
        try:
            line.sendall(framed(job))
            failed = _relay(line, board)
            process.wait(SECONDS_TO_END)
        except (OSError, subprocess.TimeoutExpired):
            failed = None
        finally:
            line.close()
            process.kill()
            process.wait()
        return 0 if _is_done(board) else _told(here, failed, words)


def _job(here: Started, board: StoreBoard) -> RankJob | None:
    """None: the first rank ended without one."""
    while not board.has(JOB):
        if board.has(DONE):
            return None
        time.sleep(SECONDS_BETWEEN_LOOKS)
    found = msgspec.msgpack.decode(board.take(JOB, SECONDS_TO_MEET), type=RankJob)
    return msgspec.structs.replace(found, rank=here.rank)


def _is_done(board: StoreBoard) -> bool:
    """A rank loses the first one when all is over, and then only."""
    from windlass.parallel.meeting import GroupLost

    try:
        return board.take(DONE, SECONDS_TO_SAY_DONE) == b"0"
    except GroupLost:
        return False


def _told(here: Started, failed: Failed | None, words: Any) -> int:
    words.seek(0)
    sys.stderr.write(words.read().decode(errors="replace"))
    print(f"windlass: rank {here.rank}: {failed.message if failed else 'it ended without a word'}", file=sys.stderr)
    return 1
