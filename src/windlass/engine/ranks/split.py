"""One model over several ranks: this rank's part of it, and the engine of the first, which alone schedules and samples.

The other ranks are started by somebody else (a fleet), who tells the first in `Launch.part` where to find them; or, where nothing is told,
by this process, on this machine.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import msgspec
import torch

from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.place import place
from windlass.core.ranks.rendezvous import KEY_BYTES, Meeting
from windlass.core.request import Info
from windlass.core.rule import Rule
from windlass.core.scheme import Scheme
from windlass.engine.engine import Engine
from windlass.engine.execute.top_logits import PickyRunner
from windlass.engine.load import KV_DTYPES, Built, Progress, build, chosen_device, make_engine, make_info
from windlass.engine.memory import block_bytes
from windlass.engine.protocol import Launch
from windlass.engine.ranks.broadcast import STEPS, Steps, announce
from windlass.engine.ranks.process import Beat, RankJob, Ranks
from windlass.engine.ranks.supervisor import Tether
from windlass.errors import Impossible
from windlass.kernels.cpu.links import make_links
from windlass.kernels.program import program
from windlass.kernels.step import KvCache
from windlass.nn.parallel.shard import ModelShard
from windlass.parallel.group import Count, GroupLost
from windlass.parallel.groups import Groups
from windlass.parallel.join import join_ranks
from windlass.parallel.store import FolderStore, RendezvousStore
from windlass.parallel.through_host import through_host

LIMITS_NOTE = "limits"
"""What the first rank leaves on the board for the others: scheduler.Limits, msgpack."""


def load_split(launch: Launch, progress: Progress | None = None) -> tuple[Engine, Info]:
    """The first rank, in this process. What it started ends with the decoder."""
    began = time.perf_counter()
    _check(launch)
    with ExitStack() as stack:
        job, board, ranks = _of_fleet(launch, stack) if launch.part is not None else _on_our_own(launch, stack)
        steps = stack.enter_context(Steps())
        try:
            built = build_rank(job, board, progress)
            groups = built.decoder.shard.groups
            stack.callback(groups.close)
            if isinstance(board, Tether):
                board.counts(partial(_beat, steps, groups))
            announce(built.decoder, steps)
            engine = _engine(launch, built)
            board.put(LIMITS_NOTE, msgspec.msgpack.encode(engine.limits))
            steps.meet(job, board)
        except GroupLost as error:
            raise GroupLost(f"{error}; {words}" if (words := _last_words(ranks)) else str(error)) from error
        weakref.finalize(built.decoder, stack.pop_all().close)
    info = make_info(launch, engine, built, built.device, time.perf_counter() - began)
    return engine, msgspec.structs.replace(info, details={**info.details, "ranks talk": _talk(job, built.device)})


def _beat(steps: Steps, groups: Groups) -> Beat:
    """How long its steps take is not asked of the first rank: whoever waits for it knows."""
    named = (("tp", groups.tp), ("pp", groups.pp))
    counts = {f"{name} {what}": count for name, group in named for what, count in group.counts().items()}
    counts[STEPS] = Count(steps.num_steps, steps.sent_bytes, 0, steps.seconds)
    return Beat(steps.num_steps, steps.num_rows, 0.0, counts)


def build_rank(job: RankJob, board: RendezvousStore, progress: Progress | None = None) -> Built:
    """Groups meet first: a rank that is missing is noticed before anything is read."""
    if program.available():
        program.set_threads(_threads(job.meeting, job.rank))
    device = device_of(job)
    if device != "cpu":
        torch.cuda.set_device(device)
    groups = _joined(job, board, device)
    return build(job.launch, device, progress, partial(_shard, job, groups), job.parts)


def _engine(launch: Launch, built: Built) -> Engine:
    """Of GPUs no graphs: what ranks say to each other is in the middle of a step."""
    decoder = built.decoder
    whole, here = block_bytes(decoder.spec, launch.kv), _block_bytes(decoder.make_caches(1, KV_DTYPES[launch.kv], "meta"))
    is_cpu = built.device == "cpu"
    return make_engine(launch, decoder, built.device, cache_share=here / whole, record=is_cpu, runner=PickyRunner)


def _block_bytes(caches: Sequence[KvCache]) -> int:
    return sum(part.nbytes for cache in caches for part in (cache.keys, cache.values) if part is not None)


def device_of(job: RankJob) -> str:
    """Ranks of a machine take its GPUs in turn."""
    chosen = chosen_device(job.launch.device)
    if chosen != "cuda":
        return chosen
    machines = job.meeting.machines
    return f"cuda:{machines[: job.rank].count(machines[job.rank]) % torch.cuda.device_count()}"


def _joined(job: RankJob, board: RendezvousStore, device: str) -> Groups:
    """GPUs that several ranks share cannot be NCCL's: what is said on them goes through the host."""
    meeting, layout = job.meeting, job.launch.layout
    if device == "cpu":
        return join_ranks(meeting, layout, job.rank, board, links=make_links)
    if meeting.transport == "gloo":
        return through_host(join_ranks(meeting, layout, job.rank, board), device)
    return join_ranks(meeting, layout, job.rank, board, device)


def _talk(job: RankJob, device: str) -> str:
    """In words."""
    if device == "cpu":
        return "by gloo" if job.meeting.transport == "gloo" else "by links"
    return "through the host, since several share a GPU: slow" if job.meeting.transport == "gloo" else "by NCCL"


def _shard(job: RankJob, groups: Groups, spec: ModelSpec, rules: tuple[Rule, ...], stored: Callable[[], Scheme]) -> ModelShard:
    layout = job.launch.layout
    placement = place(rules, spec.num_layers, layout, stored(), shares=job.shares or None, stages=job.stages or None)
    return ModelShard(placement, layout, groups)


# --- the first rank's own beginning


def _of_fleet(launch: Launch, stack: ExitStack) -> tuple[RankJob, RendezvousStore, None]:
    part = launch.part
    assert part is not None
    job = RankJob(launch=launch, rank=part.rank, meeting=part.meeting, epoch=part.epoch, shares=part.shares, stages=part.stages)
    connection = stack.enter_context(socket.socket(fileno=part.socket))
    tether = Tether(connection, ends_process=not part.is_guest)
    tether.watch()
    return job, tether, None


def _on_our_own(launch: Launch, stack: ExitStack) -> tuple[RankJob, RendezvousStore, Ranks]:
    folder = tempfile.mkdtemp(prefix="windlass-")  # ours alone: mode 0700
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    world = launch.layout.world
    meeting = Meeting(
        key=os.urandom(KEY_BYTES), hosts=("",) * world, machines=(0,) * world, transport=local_transport(launch.device, world)
    )
    jobs = [RankJob(launch=launch, rank=rank, meeting=meeting, store=folder) for rank in range(world)]
    ranks = Ranks(jobs[1:], _threads(meeting, 0))
    stack.callback(ranks.close)
    return jobs[0], FolderStore(folder), ranks


def local_transport(device: str, num_ranks: int) -> str:
    """NCCL wants a GPU for every rank."""
    on_gpus = chosen_device(device).split(":")[0] == "cuda"
    return "gloo" if on_gpus and num_ranks > torch.cuda.device_count() else "auto"


def _threads(meeting: Meeting, rank: int) -> int:
    """Cores are shared out among the ranks of a machine."""
    return max(program.num_threads() // meeting.machines.count(meeting.machines[rank]), 1)


def _last_words(ranks: Ranks | None) -> str:
    """Who is lost may have said why."""
    if ranks is None:
        return ""
    return "; ".join(
        f"rank {rank}: {failed.message}" for rank, failed in ranks.failed.items() if failed.kind != GroupLost.__name__
    )


def _check(launch: Launch) -> None:
    layout: Layout = launch.layout
    if layout.dp > 1:
        raise Impossible(f"dp {layout.dp}: copies of a model are servers of their own; choose tp and pp")
    if chosen_device(launch.device).split(":")[0] not in ("cpu", "cuda"):
        raise Impossible(f"{layout} on {launch.device}: a model is split over CPUs or NVIDIA GPUs; add --device cpu")
