"""From a RankJob to an engine: a model on one device, or rank 0 of several, which alone schedules and samples.

The other ranks are started by a fleet; the job says how to meet them.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import msgspec
import torch

from windlass.core.launch import Launch, RankJob
from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.place import place
from windlass.core.ranks.rendezvous import Meeting
from windlass.core.request import Info
from windlass.core.rule import Rule
from windlass.core.scheme import Scheme
from windlass.errors import Impossible
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.execute.top_logits import TopLogitsRunner
from windlass.runtime.engine.load import (
    KV_DTYPES,
    LoadedDecoder,
    Progress,
    build,
    chosen_device,
    load_model,
    make_engine,
    make_info,
    with_limits,
)
from windlass.runtime.engine.memory import block_bytes
from windlass.runtime.engine.ranks.broadcast import SECONDS_TO_LOAD, STEPS, StepBroadcast, broadcast_steps
from windlass.runtime.engine.ranks.messages import RankHeartbeat
from windlass.runtime.engine.ranks.supervisor import SupervisorConnection
from windlass.runtime.kernels.cpu.links import make_links
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.step import KvCache
from windlass.runtime.nn.parallel.shard import ModelShard
from windlass.runtime.parallel.group import Count
from windlass.runtime.parallel.groups import Groups
from windlass.runtime.parallel.join import join_ranks
from windlass.runtime.parallel.store import RendezvousStore
from windlass.runtime.parallel.through_host import through_host

LIMITS_KEY = "limits"
"""Key under which rank 0 publishes the scheduler's Limits (msgpack) for the others."""

OPENED = "opened"
"""Keys of the rendezvous store: ranks that have opened their files."""


def load_job(job: RankJob, progress: Progress | None = None) -> tuple[Engine, Info]:
    return load_model(job.launch, progress) if job.meeting is None else _load_first(job, job.meeting, progress)


def _load_first(job: RankJob, meeting: Meeting, progress: Progress | None) -> tuple[Engine, Info]:
    """The groups and sockets of rank 0 close with its decoder."""
    began = time.perf_counter()
    _check(job.launch)
    with ExitStack() as stack:
        connection = stack.enter_context(socket.socket(fileno=job.supervisor_fd))
        supervisor = SupervisorConnection(connection, ends_process=not job.is_inline)
        supervisor.watch()
        steps = stack.enter_context(StepBroadcast())
        built = build_rank(job, supervisor, progress)
        groups = built.decoder.shard.groups
        stack.callback(groups.close)
        supervisor.report_with(partial(_heartbeat, steps, groups))
        broadcast_steps(built.decoder, steps, timed=str(built.device) == "cpu")
        engine = _engine(job.launch, built)
        if built.device != "cpu":
            engine.runner.warm_up()
        supervisor.put(LIMITS_KEY, msgspec.msgpack.encode(engine.limits))
        steps.connect(job.rank, meeting, supervisor)
        if built.device != "cpu":
            engine.try_steps()  # kernels of prompts, on all ranks: none is compiled while somebody waits for an answer
        weakref.finalize(built.decoder, stack.pop_all().close)
    info = make_info(job.launch, engine, built, built.device, time.perf_counter() - began)
    return engine, msgspec.structs.replace(info, details={**info.details, "collectives": _transport_name(meeting, built.device)})


def _heartbeat(steps: StepBroadcast, groups: Groups) -> RankHeartbeat:
    """Without step seconds on a GPU, where the caller measures them."""
    named = (("tp", groups.tp), ("pp", groups.pp))
    counts = {f"{name} {what}": count for name, group in named for what, count in group.counts().items()}
    counts[STEPS] = Count(steps.num_steps, steps.sent_bytes, 0, steps.seconds)
    return RankHeartbeat(steps.num_steps, steps.num_rows, steps.step_seconds, counts)


def build_rank(job: RankJob, store: RendezvousStore, progress: Progress | None = None) -> LoadedDecoder:
    """Groups meet first, so that a missing rank is noticed before any weight is read."""
    meeting = job.meeting
    assert meeting is not None
    if program.available():
        program.set_threads(_threads(meeting, job.rank))
    device = device_of(job.launch.device, meeting, job.rank)
    if device != "cpu":
        torch.cuda.set_device(device)
    groups = _join(job, meeting, store, device)

    def shard_of(spec: ModelSpec, rules: tuple[Rule, ...], stored: Callable[[], Scheme]) -> ModelShard:
        """Files are open then, which may take long on a slow disk: from here on ranks wait for each other no longer than in a step."""
        _meet(store, job.rank, len(meeting.hosts))
        return _shard(job, groups, spec, rules, stored)

    return build(job.launch, device, progress, shard_of, job.slices_folder)


def _meet(store: RendezvousStore, rank: int, num_ranks: int) -> None:
    """Until all ranks are here."""
    store.put(f"{OPENED}/{rank}", b"")
    for other in range(num_ranks):
        store.take(f"{OPENED}/{other}", SECONDS_TO_LOAD)


def _engine(launch: Launch, built: LoadedDecoder) -> Engine:
    """No CUDA graphs: collectives are in the middle of a step."""
    decoder = built.decoder
    whole, here = (
        block_bytes(decoder.spec, launch.kv_type),
        _block_bytes(decoder.make_caches(1, KV_DTYPES[launch.kv_type], "meta")),
    )
    is_cpu = built.device == "cpu"
    return make_engine(
        with_limits(launch, built), decoder, built.device, cache_share=here / whole, record=is_cpu, runner=TopLogitsRunner
    )


def _block_bytes(caches: Sequence[KvCache]) -> int:
    return sum(part.nbytes for cache in caches for part in cache.parts)


def device_of(asked: str, meeting: Meeting, rank: int) -> str:
    """Ranks of a machine take its GPUs round robin."""
    chosen = chosen_device(asked)
    if chosen != "cuda":
        return chosen
    machines = meeting.machines
    return f"cuda:{machines[:rank].count(machines[rank]) % torch.cuda.device_count()}"


def _join(job: RankJob, meeting: Meeting, store: RendezvousStore, device: str) -> Groups:
    """NCCL refuses ranks that share a GPU: their collectives go through the host (transport gloo)."""
    layout = job.launch.layout
    if device == "cpu":
        return join_ranks(meeting, layout, job.rank, store, links=make_links)
    if meeting.transport == "gloo":
        return through_host(join_ranks(meeting, layout, job.rank, store), device)
    return join_ranks(meeting, layout, job.rank, store, device)


def _transport_name(meeting: Meeting, device: str) -> str:
    if device == "cpu":
        return "gloo" if meeting.transport == "gloo" else "native links"
    return "through host memory (several ranks share a GPU: slow)" if meeting.transport == "gloo" else "NCCL"


def _shard(job: RankJob, groups: Groups, spec: ModelSpec, rules: tuple[Rule, ...], stored: Callable[[], Scheme]) -> ModelShard:
    layout = job.launch.layout
    placement = place(rules, spec.num_layers, layout, stored(), shares=job.shares or None, stages=job.stages or None)
    return ModelShard(placement, layout, groups)


def _threads(meeting: Meeting, rank: int) -> int:
    """The ranks of a machine divide its cores."""
    return max(program.num_threads() // meeting.machines.count(meeting.machines[rank]), 1)


def _check(launch: Launch) -> None:
    layout: Layout = launch.layout
    if layout.dp > 1:
        raise Impossible(f"dp {layout.dp}: replicas are separate servers; choose tp and pp")
    if chosen_device(launch.device).split(":")[0] not in ("cpu", "cuda"):
        raise Impossible(f"{layout} on {launch.device}: a model is split over CPUs or NVIDIA GPUs; add --device cpu")
