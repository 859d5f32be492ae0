"""The other ranks of a split model, as the first one sees them: started, told of every step, and gone when it is.

Each is a process `python -m windlass.engine.rank FD`, FD being one end of a pair of Unix sockets. What it is to be comes on standard input;
frames on the socket follow: the limits, whereupon it says that it is ready, and then the steps. Ranks talk to each other by their groups,
which meet through a file in a folder of their own. On this machine only.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from typing import Any

import msgspec

from windlass.core.client import Unavailable
from windlass.core.layout import Layout
from windlass.core.model import Frozen
from windlass.engine.protocol import Launch
from windlass.engine.scheduler import Limits
from windlass.engine.step_message import encode_step
from windlass.kernels import program
from windlass.kernels.step import Step

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 2**26
SECONDS_TO_END = 5.0


class RankJob(Frozen):
    launch: Launch
    rank: int
    store: str
    """A file through which groups meet."""


class Ranks:
    def __init__(self, launch: Launch) -> None:
        self.layout: Layout = launch.layout
        self._folder = tempfile.mkdtemp(prefix="windlass-")  # ours alone: mode 0700
        self.store = f"{self._folder}/store"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        threads = max(program.num_threads() // self.layout.world, 1)
        program.set_threads(threads)  # cores are shared out, here too
        for rank in range(1, self.layout.world):
            self._start(RankJob(launch=launch, rank=rank, store=self.store), threads)

    def _start(self, job: RankJob, threads: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "windlass.engine.rank", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "WINDLASS_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)},
            )
        self._processes.append(process)
        self._sockets.append(ours)
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(msgspec.msgpack.encode(job))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def begin(self, limits: Limits) -> None:
        """Returns when all are ready."""
        self._tell(msgspec.msgpack.encode(limits))
        for rank, connection in enumerate(self._sockets, start=1):
            if read_frame(connection) is None:
                raise Unavailable(f"rank {rank} of {self.layout.world} ended while it was loading; what it said is above")

    def tell(self, step: Step) -> None:
        self._tell(encode_step(step))

    def _tell(self, data: bytes) -> None:
        for rank, connection in enumerate(self._sockets, start=1):
            try:
                write_frame(connection, data)
            except OSError as error:
                raise Unavailable(f"rank {rank} of {self.layout.world} is gone: {error}") from error

    def close(self) -> None:
        """They end when their sockets do. May be called twice."""
        for connection in self._sockets:
            connection.close()
        for process in self._processes:
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


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


def announce(decoder: Any, ranks: Ranks) -> None:
    """Before every pass of the decoder, recorded or not, the others are told of its step."""
    decoder.register_forward_pre_hook(lambda _, given: program.call(lambda: ranks.tell(given[0])))
