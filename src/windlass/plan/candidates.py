"""One layout, evaluated: who sits where, what each holds, how quick it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec

from windlass.core.hardware import Hardware
from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.place import Interval, stages_of
from windlass.core.plan import Speed
from windlass.core.scheme import Scheme
from windlass.core.workload import Workload
from windlass.plan.engines import Engine
from windlass.plan.memory import Fit, MemoryModel, Offloaded, Seat, offload
from windlass.plan.shards import Sizes
from windlass.plan.speed import SpeedModel
from windlass.plan.stages import balance


@dataclass(frozen=True)
class Candidate:
    spec: ModelSpec
    engine: Engine
    scheme: Scheme
    layout: Layout
    workload: Workload
    fit: Fit
    speed: Speed

    @property
    def fits(self) -> bool:
        return self.fit.short_bytes == 0


@dataclass(frozen=True)
class Site:
    """Hardware as the search walks it: every device with its node, looked up once."""

    hardware: Hardware

    @cached_property
    def nodes_of(self) -> tuple[int, ...]:
        return tuple(index for index, node in enumerate(self.hardware.nodes) for _ in node.devices)

    @cached_property
    def uniform(self) -> bool:
        return self.hardware.uniform

    def seats(self, layout: Layout, *, every: bool) -> tuple[Seat, ...]:
        """The first replica. On alike devices the first and last of each tp group stand for all (the first holds most)."""
        devices = self.hardware.devices
        chosen = range(layout.tp) if every or not self.uniform else sorted({0, layout.tp - 1})
        return tuple(
            Seat(device=devices[pp * layout.tp + tp], node=self.nodes_of[pp * layout.tp + tp], tp=tp, pp=pp)
            for pp in range(layout.pp)
            for tp in chosen
        )


def tp_shares(site: Site, layout: Layout) -> tuple[float, ...]:
    """How much each tp index takes: by bandwidth, since decode reads what it holds, but never beyond its part of the memory."""
    if site.uniform or layout.tp == 1:
        return ()
    devices = site.hardware.devices
    groups = [devices[first : first + layout.tp] for first in range(0, layout.tp * layout.pp, layout.tp)]
    speed = [min(group[index].measured_bandwidth for group in groups) for index in range(layout.tp)]
    room = [min(group[index].memory_bytes for group in groups) for index in range(layout.tp)]
    shares = [one / sum(speed) for one in speed]
    limits = [one / sum(room) for one in room]
    # Memory binds before speed does only where a device is quick and small; then its share is its part of the memory.
    return tuple(min(share, 1.25 * limit) for share, limit in zip(shares, limits, strict=True))


def evaluate(
    sizes: Sizes,
    site: Site,
    engine: Engine,
    scheme: Scheme,
    layout: Layout,
    workload: Workload,
    *,
    spill: bool = False,
    every: bool = False,
) -> Candidate:
    """`spill`: what does not fit goes to host memory and disk. `every`: all devices of the replica, for the plan that is kept."""
    model = MemoryModel(sizes, engine, workload, scheme)
    shares = tp_shares(site, layout)
    stages = choose_stages(model, site, layout, shares)
    fit = _fit(model, site, layout, stages, shares, every)
    if fit.short_bytes and spill and engine.offload:
        fit = offload(fit, model, site.hardware, layout)
    return Candidate(sizes.spec, engine, scheme, layout, workload, fit, SpeedModel(model, site.hardware, layout, fit).speed())


def choose_stages(model: MemoryModel, site: Site, layout: Layout, shares: tuple[float, ...]) -> tuple[Interval, ...]:
    """Windlass balances bytes over unlike stages; engines that split evenly are taken at their word (vLLM: 80 in 3 is 27, 27, 26)."""
    num_layers = model.spec.num_layers
    if layout.pp == 1 or not model.engine.uneven:
        return stages_of(num_layers, layout.pp)
    shard = model.sizes.shard(layout, model.scheme, 0, shares)
    weights = [shard.between(shard.always, (i, i + 1)) + shard.between(shard.experts, (i, i + 1)) for i in range(num_layers)]
    cached = [model.kv(shard, (i, i + 1), layout) for i in range(num_layers)]
    speeds, rooms = _stage_speeds(model, site, layout)
    head = shard.head_bytes + (shard.embed_bytes if model.spec.tied_head else 0.0)
    held = [weight + kv for weight, kv in zip(weights, cached, strict=True)]
    return balance(held, speeds, rooms, first=shard.embed_bytes, last=head)


def _stage_speeds(model: MemoryModel, site: Site, layout: Layout) -> tuple[list[float], list[float]]:
    """Per stage: bandwidth of its slowest member and room for weights and cache of its fullest."""
    devices = site.hardware.devices
    speeds: list[float] = []
    rooms: list[float] = []
    for pp in range(layout.pp):
        group = devices[pp * layout.tp : (pp + 1) * layout.tp]
        speeds.append(min(device.measured_bandwidth for device in group))
        rooms.append(min(device.memory_bytes - model.overhead(device, layout) for device in group) * 0.98)
    return speeds, rooms


def _fit(
    model: MemoryModel, site: Site, layout: Layout, stages: tuple[Interval, ...], shares: tuple[float, ...], every: bool
) -> Fit:
    seats = site.seats(layout, every=every)
    memory = tuple(
        model.device_memory(seat, model.sizes.shard(layout, model.scheme, seat.tp, shares), stages[seat.pp], layout)
        for seat in seats
    )
    worst = max(held.total_bytes - held.capacity_bytes for held in memory)
    return Fit(
        seats=seats,
        memory=memory,
        offloaded=(Offloaded(),) * len(seats),
        short_bytes=max(worst, 0),
        free_bytes=max(-worst, 0),
        stages=stages,
        shares=shares,
    )


def most_sequences(
    sizes: Sizes, site: Site, engine: Engine, scheme: Scheme, layout: Layout, workload: Workload
) -> Candidate | None:
    """With as many sequences as the memory holds; None where not even one of full length fits.

    A paged cache holds what sequences have written, not what they may: on average a prompt and half an answer each.
    """
    single = msgspec.structs.replace(workload, concurrency=layout.dp)
    found = evaluate(sizes, site, engine, scheme, layout, single)
    if not found.fits:
        return None
    mean = msgspec.structs.replace(workload, reserve_tokens=round(workload.mean_decode_context))
    count = _room_for(evaluate(sizes, site, engine, scheme, layout, msgspec.structs.replace(mean, concurrency=layout.dp)), engine)
    while count > 1:  # logits and steps grow with the sequences too, so the first guess may be a few too many
        grown = evaluate(sizes, site, engine, scheme, layout, msgspec.structs.replace(mean, concurrency=count * layout.dp))
        if grown.fits:
            return grown
        count = min(count - 1, int(count * 0.97))
    return found


def _room_for(found: Candidate, engine: Engine) -> int:
    per_sequence = max(held.kv_bytes for held in found.fit.memory)
    extra = found.fit.free_bytes // per_sequence if per_sequence else engine.max_sequences
    return min(1 + extra, engine.max_sequences)
