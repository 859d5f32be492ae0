"""One rank of a split model but the first, a process of its own: does what it is told, step by step, and talks to its groups."""

from __future__ import annotations

import signal
import socket
import sys
from typing import TYPE_CHECKING

import msgspec

from windlass.engine.lifeline import die_with_parent, end_with
from windlass.engine.own_ranks import RankJob, read_frame, write_frame
from windlass.engine.scheduler import Limits
from windlass.errors import Error

if TYPE_CHECKING:
    from windlass.nn.decoder import Decoder

READY = b"ready"


def main() -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program in front, whose end is ours
    connection = socket.socket(fileno=int(sys.argv[1]))
    end_with(connection.fileno())
    job = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=RankJob)
    try:
        _follow(job, connection)
    except Error as error:
        print(f"rank {job.rank}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _follow(job: RankJob, connection: socket.socket) -> None:
    from windlass.engine.split import build_rank

    built = build_rank(job.launch, job.rank, job.store)
    data = read_frame(connection)
    if data is None:
        return
    follower = Follower(built.decoder, msgspec.msgpack.decode(data, type=Limits), job.launch.kv)
    write_frame(connection, READY)
    while (data := read_frame(connection)) is not None:
        follower.step(data)


class Follower:
    """What a Runner is to the first rank; what to compute comes in messages."""

    def __init__(self, decoder: Decoder, limits: Limits, kv: str) -> None:
        import torch

        from windlass.engine.load import KV_DTYPES
        from windlass.engine.runner import Buffers
        from windlass.kernels import program

        self._decoder, self._buffers = decoder, Buffers(limits, torch.device("cpu"))
        self._caches = decoder.make_caches(limits.num_blocks, KV_DTYPES[kv], "cpu")
        self._program: program.Program | None = None
        if program.available():
            with program.record(self._buffers.step.counts[0:1]) as self._program:
                decoder(self._buffers.step, self._caches)

    def step(self, data: bytes) -> None:
        import torch

        from windlass.engine.step_message import decode_step

        decode_step(data, self._buffers)
        if self._program is not None:
            self._program.run()
            return
        with torch.inference_mode():
            self._decoder(self._buffers.step, self._caches)


if __name__ == "__main__":
    sys.exit(main())
