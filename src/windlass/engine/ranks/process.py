"""The ranks of a split model but the first, as whoever starts them sees them: a process each, and a line to it. No torch.

A rank is a process `python -m windlass.engine.ranks.rank FD`, FD being one end of a pair of Unix sockets, its line to its supervisor. The first
frame on it is the job; what a rank says on it is below. It ends when the line does. Steps do not come this way: they come from the first
rank itself, wherever that is.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

import msgspec

from windlass.core.launch import Launch
from windlass.core.model import Frozen
from windlass.core.place import Interval
from windlass.core.ranks.rendezvous import Meeting
from windlass.engine.protocol import Failed, Loading
from windlass.parallel.group import Count

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 2**26
SECONDS_TO_END = 5.0
SECONDS_BETWEEN_BEATS = 0.5
SECONDS_WITHOUT_BEAT = 4.0
"""A process that says nothing for so long is stopped, or swaps, and holds all others up."""


class RankJob(Frozen):
    launch: Launch
    rank: int
    meeting: Meeting
    epoch: int = 0
    shares: tuple[float, ...] = ()
    """Of the work, by tp index; empty: equal."""
    stages: tuple[Interval, ...] = ()
    """Layers of each pp index; empty: as equal as can be."""
    store: str = ""
    """The folder of a board on this machine; empty: the board is behind the line."""
    parts: str = ""
    """A folder of received slices; empty: `launch.model` is read."""


# --- what is said on the line


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Beat(Message, frozen=True):
    """Twice a second, from a thread of its own: in the middle of a step too."""

    steps: int = 0
    rows: int = 0
    """Tokens that went through the decoder."""
    step_seconds: float = 0.0
    """In steps, collectives too."""
    counts: dict[str, Count] = {}
    """By group and collective: `tp all_reduce`."""
    is_answer: bool = False
    """To AskBeat."""


class BuiltRank(Message, frozen=True):
    """Weights are there, the program is recorded; what is missing is the first step."""

    weights_bytes: int = 0


class Put(Message, frozen=True):
    key: str
    value: bytes


class Take(Message, frozen=True):
    id: int
    key: str
    timeout_seconds: float


RankSaid = Beat | Loading | BuiltRank | Failed | Put | Take


class Found(Message, frozen=True):
    """To Take."""

    id: int
    value: bytes


class NotFound(Message, frozen=True):
    id: int
    words: str


class AskBeat(Message, frozen=True):
    pass


SaidToRank = Found | NotFound | AskBeat

encode = msgspec.msgpack.Encoder().encode
decode_said = msgspec.msgpack.Decoder(RankSaid).decode
decode_told = msgspec.msgpack.Decoder(SaidToRank).decode


def framed(message: Message | Loading | Failed | RankJob) -> bytes:
    body = encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


# --- starting one


def start_rank(threads: int, words: IO[bytes] | None = None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that waits for its job. Linux ends it with the thread that started it: call this in one that stays.

    `threads`: of PyTorch; kernels share out what WINDLASS_THREADS says, or all cores, themselves. `words`: a file for what it writes.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = subprocess.Popen(
            # -P: what lies in the current directory is not imported.
            [sys.executable, "-P", "-m", "windlass.engine.ranks.follower", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=words,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            process_group=0,  # Ctrl-C in a terminal is for whoever started it
        )
    return process, ours


class Ranks:
    """Ranks of this machine that a process starts for itself, with nobody to supervise them: they end with it, or when they are closed."""

    def __init__(self, jobs: Sequence[RankJob], threads: int) -> None:
        self._started = [(job.rank, *start_rank(threads)) for job in jobs]
        self._failed: dict[int, Failed] = {}
        for (rank, _, connection), job in zip(self._started, jobs, strict=True):
            connection.sendall(framed(job))
            threading.Thread(target=self._listen, args=(rank, connection), daemon=True).start()

    @property
    def pids(self) -> list[int]:
        return [process.pid for _, process, _ in self._started]

    @property
    def failed(self) -> dict[int, Failed]:
        """By rank, what they said last."""
        return dict(self._failed)

    def close(self) -> None:
        """May be called twice."""
        for _, process, connection in self._started:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _listen(self, rank: int, connection: socket.socket) -> None:
        """So that beats do not pile up. A board of their own is a folder's: nothing is asked for."""
        with suppress(OSError, ValueError, msgspec.DecodeError):
            while (data := read_frame(connection)) is not None:
                said = decode_said(data)
                if isinstance(said, Failed):
                    self._failed[rank] = said


# --- frames, for whoever waits


def write_frame(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(LENGTH_BYTES, "big") + data)


def read_frame(connection: socket.socket) -> bytes | None:
    """None: the other end is closed."""
    length = _read(connection, LENGTH_BYTES)
    if length is None:
        return None
    count = int.from_bytes(length, "big")
    if count > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {count:,} bytes, where the longest has {MAX_FRAME_BYTES:,}")
    return _read(connection, count)


def _read(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        try:
            part = connection.recv(count - len(data))
        except ConnectionResetError:
            return None
        if not part:
            return None
        data += part
    return bytes(data)
