"""One rank of a split model but the first, a process of its own: does what it is told, step by step, and talks to its groups.

Its job comes on its line to whoever started it (engine/ranks/supervisor.py), with which it ends; steps come from the first rank.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from windlass.engine.parent_death import die_with_parent
from windlass.engine.ranks.process import Beat, RankJob, read_frame

if TYPE_CHECKING:
    from windlass.engine.ranks.supervisor import Tether
    from windlass.engine.schedule.scheduler import Limits
    from windlass.nn.decoder import Decoder
    from windlass.parallel.store import RendezvousStore

SECONDS_BETWEEN_PROGRESS = 0.2


def main() -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program in front, whose end is ours
    from windlass.engine.ranks.supervisor import Tether

    tether = Tether(socket.socket(fileno=int(sys.argv[1])))
    job = tether.job()
    try:
        _follow(job, tether)
    except (BrokenPipeError, ConnectionResetError):  # the line went in the middle of a word
        return 0
    except Exception as error:  # noqa: BLE001 - the outermost edge: whoever waits is told, and the process ends
        _tell(error, tether)
        return getattr(error, "exit_code", 1)
    return 0


def _tell(error: Exception, tether: Tether) -> None:
    from windlass.errors import Error
    from windlass.parallel.group import GroupLost

    if not isinstance(error, Error | GroupLost):
        import traceback

        traceback.print_exc()
    tether.failed(error)


def _follow(job: RankJob, tether: Tether) -> None:
    from windlass.engine.ranks.broadcast import SECONDS_TO_LOAD
    from windlass.engine.ranks.split import LIMITS_NOTE, build_rank
    from windlass.engine.schedule.scheduler import Limits
    from windlass.parallel.store import FolderStore

    tether.watch()  # only now: until all is imported no thread would have its turn
    board: RendezvousStore = FolderStore(job.store) if job.store else tether
    built = build_rank(job, board, _Progress(tether))
    limits = msgspec.msgpack.decode(board.take(LIMITS_NOTE, SECONDS_TO_LOAD), type=Limits)
    follower = Follower(built.decoder, limits, job.launch.kv, built.device)
    tether.counts(follower.beat)
    tether.built(built.weights_bytes)
    follower.follow(_steps(job, board))


def _steps(job: RankJob, board: RendezvousStore) -> socket.socket:
    """The connection to the first rank. Others are of no use: each rank hears of steps from it alone."""
    from windlass.engine.ranks.broadcast import SECONDS_TO_LOAD, STEPS
    from windlass.parallel.mesh import connect_all

    meeting, world = job.meeting, job.launch.layout.world
    first, *others = connect_all(board, STEPS, job.rank, world, meeting.key, meeting.hosts[job.rank], SECONDS_TO_LOAD)
    for other in others:
        if other is not None:
            other.close()
    assert first is not None
    return first


class Follower:
    """What a Runner is to the first rank; what to compute comes in messages."""

    def __init__(self, decoder: Decoder, limits: Limits, kv: str, device: str = "cpu") -> None:
        import torch

        from windlass.engine.execute.runner import Buffers
        from windlass.engine.load import KV_DTYPES
        from windlass.kernels.program import program
        from windlass.kernels.program.only_views import NotRecordable

        self._decoder, self._buffers = decoder, Buffers(limits, torch.device(device))
        spare = int(device != "cpu")  # see Runner
        self._caches = decoder.make_caches(limits.num_blocks + spare, KV_DTYPES[kv], device)
        self._steps = self._rows = 0
        self._seconds = 0.0
        self._program: program.Program | None = None
        if device == "cpu" and program.available():
            try:
                with program.record(self._buffers.step.counts[0:1]) as self._program:
                    decoder(self._buffers.step, self._caches)
            except NotRecordable:
                self._program = None

    def follow(self, steps: socket.socket) -> None:
        """Whoever tells of steps tells also when there are no more: by going."""
        from windlass.parallel.group import GroupLost

        while (data := read_frame(steps)) is not None:
            began = time.perf_counter()
            self.step(data)
            self._seconds += time.perf_counter() - began
            self._steps += 1
            self._rows += int(self._buffers.counts[0])
        raise GroupLost("the first rank is gone")

    def step(self, data: bytes) -> None:
        import torch

        from windlass.engine.execute.step_codec import decode_step

        self._buffers.wait()
        decode_step(data, self._buffers)
        if self._program is not None:
            self._program.run()
            return
        self._buffers.upload(int(self._buffers.counts[1]), blocks_changed=True)
        with torch.inference_mode():
            self._decoder(self._buffers.step, self._caches)

    def beat(self) -> Beat:
        """In another thread than steps are done in."""
        groups = self._decoder.shard.groups
        named = (("tp", groups.tp), ("pp", groups.pp))
        counts = {f"{name} {what}": count for name, group in named for what, count in group.counts().items()}
        return Beat(self._steps, self._rows, self._seconds, counts)


class _Progress:
    """A few times a second is enough to be seen."""

    def __init__(self, tether: Tether) -> None:
        self._tether, self._last = tether, 0.0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if done_bytes >= total_bytes or now - self._last > SECONDS_BETWEEN_PROGRESS:
            self._last = now
            self._tether.loading(done_bytes, total_bytes)


if __name__ == "__main__":
    sys.exit(main())
