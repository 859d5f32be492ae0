"""The process of a rank other than rank 0: runs the decoder on every step that rank 0 broadcasts.

Its RankJob comes over the socket to its supervisor (runtime/engine/ranks/supervisor.py); it exits when that socket closes.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from windlass.core.launch import RankJob
from windlass.core.ranks.frames import read_frame
from windlass.core.ranks.rendezvous import Meeting
from windlass.runtime.engine.progress import ThrottledProgress
from windlass.runtime.engine.ranks.messages import RankHeartbeat
from windlass.runtime.machine.parent_death import kill_with_parent
from windlass.runtime.machine.torch_import import importing

if TYPE_CHECKING:
    from windlass.runtime.engine.ranks.supervisor import SupervisorConnection
    from windlass.runtime.engine.schedule.scheduler import SchedulerLimits
    from windlass.runtime.nn.decoder import Decoder
    from windlass.runtime.parallel.store import RendezvousStore

SECONDS_BETWEEN_PROGRESS = 0.2
SECONDS_BETWEEN_TIERS = 1.0


def main() -> int:
    kill_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose exit ends this process
    from windlass.runtime.engine.ranks.supervisor import SupervisorConnection

    supervisor = SupervisorConnection(socket.socket(fileno=int(sys.argv[1])))
    job = supervisor.job()
    try:
        _follow(job, supervisor)
    except (BrokenPipeError, ConnectionResetError):  # the supervisor is gone
        return 0
    except Exception as error:  # noqa: BLE001 - the outermost edge: report it and exit
        _report(error, supervisor)
        return getattr(error, "exit_code", 1)
    return 0


def _report(error: Exception, supervisor: SupervisorConnection) -> None:
    from windlass.errors import Error
    from windlass.runtime.parallel.group import GroupLost

    if not isinstance(error, Error | GroupLost):
        import traceback

        traceback.print_exc()
    supervisor.failed(error)


def _follow(job: RankJob, supervisor: SupervisorConnection) -> None:
    with importing():
        from windlass.runtime.engine.ranks.broadcast import SECONDS_TO_LOAD
        from windlass.runtime.engine.ranks.first import LIMITS_KEY, build_rank
        from windlass.runtime.engine.schedule.scheduler import SchedulerLimits
        from windlass.runtime.kernels.program import program

    supervisor.watch()  # only now: importing torch would block its threads
    assert job.meeting is not None
    built = build_rank(job, supervisor, ThrottledProgress(supervisor.loading, SECONDS_BETWEEN_PROGRESS))
    limits = msgspec.msgpack.decode(supervisor.take(LIMITS_KEY, SECONDS_TO_LOAD), type=SchedulerLimits)
    with program.batch_invariant(job.launch.deterministic):
        follower = Follower(built.decoder, limits, job.launch.kv_type, built.device)
        supervisor.report_with(follower.heartbeat)
        supervisor.built(built.weights_bytes)
        follower.follow(_steps(job.rank, job.meeting, supervisor))


def _steps(rank: int, meeting: Meeting, store: RendezvousStore) -> socket.socket:
    """The connection to rank 0, which alone broadcasts steps; those to other ranks are closed."""
    from windlass.runtime.engine.ranks.broadcast import SECONDS_TO_LOAD, STEPS
    from windlass.runtime.parallel.mesh import connect_all

    world = len(meeting.hosts)
    first, *others = connect_all(store, STEPS, rank, world, meeting.key, meeting.hosts[rank], SECONDS_TO_LOAD)
    for other in others:
        if other is not None:
            other.close()
    assert first is not None
    return first


class Follower:
    """The Runner of a rank other than 0: what to compute comes in messages."""

    def __init__(self, decoder: Decoder, limits: SchedulerLimits, kv: str, device: str = "cpu") -> None:
        import torch

        from windlass.runtime.engine.execute.buffers import Buffers
        from windlass.runtime.engine.execute.graphs import compile_kernels
        from windlass.runtime.engine.load import KV_DTYPES
        from windlass.runtime.engine.tiers import tier_stats
        from windlass.runtime.kernels.program import program
        from windlass.runtime.kernels.program.only_views import NotRecordable

        self._decoder, self._buffers = decoder, Buffers(limits, torch.device(device))
        spare = int(device != "cpu")  # see Runner
        self._caches = decoder.make_caches(limits.num_blocks + spare, KV_DTYPES[kv], device)
        self._steps = self._rows = 0
        self._seconds = 0.0
        self._after_step: Callable[[], None] | None = getattr(decoder.tier, "after_step", None)
        self._tier_stats, self._is_cpu = partial(tier_stats, decoder), device == "cpu"
        self._tiers, self._tiers_asked = self._tier_stats(), time.monotonic()
        if device != "cpu":
            compile_kernels(decoder, self._caches, self._buffers.step)
        self._program: program.Program | None = None
        if device == "cpu" and program.available():
            try:
                with program.record(self._buffers.step.counts[0:1]) as self._program:
                    decoder(self._buffers.step, self._caches)
            except NotRecordable:
                self._program = None

    def follow(self, steps: socket.socket) -> None:
        """Until rank 0 closes the connection."""
        from windlass.runtime.parallel.group import GroupLost

        while (data := read_frame(steps)) is not None:
            began = time.perf_counter()
            self.step(data)
            self._ask_device()
            self._seconds += time.perf_counter() - began
            self._steps += 1
            self._rows += int(self._buffers.counts[0])
        raise GroupLost("rank 0 is gone")

    def step(self, data: bytes) -> None:
        import torch

        from windlass.runtime.engine.execute.step_codec import decode_step

        self._buffers.wait()
        decode_step(data, self._buffers)
        if self._program is not None:
            self._program.run()
            return
        self._buffers.upload(int(self._buffers.counts[1]), blocks_changed=True)
        with torch.inference_mode():
            self._decoder(self._buffers.step, self._caches)
        if self._after_step is not None:
            self._after_step()

    def _ask_device(self) -> None:
        """What its tiers are. This waits for its steps, which may take longer than a heartbeat may: so here, and not after every step."""
        now = time.monotonic()
        if not self._is_cpu and now - self._tiers_asked > SECONDS_BETWEEN_TIERS:
            self._tiers, self._tiers_asked = self._tier_stats(), now

    def heartbeat(self) -> RankHeartbeat:
        """Called from the heartbeat thread."""
        groups = self._decoder.shard.groups
        named = (("tp", groups.tp), ("pp", groups.pp))
        counts = {f"{name} {what}": count for name, group in named for what, count in group.counts().items()}
        return RankHeartbeat(
            self._steps, self._rows, self._seconds, counts, tiers=self._tier_stats() if self._is_cpu else self._tiers
        )


if __name__ == "__main__":
    sys.exit(main())
