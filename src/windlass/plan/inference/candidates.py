"""One layout, evaluated: who sits where, what each holds, how quick it is."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from windlass.core.hardware.spec import Device
from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.place import Interval, stages_of
from windlass.core.plan import Speed
from windlass.core.rule import AxisName
from windlass.core.scheme import Scheme
from windlass.core.workload import Workload
from windlass.plan.engines import EngineProfile
from windlass.plan.inference.sites import Site
from windlass.plan.inference.stages import balance
from windlass.plan.memory import Fit, MemoryModel, Offloaded, offload
from windlass.plan.shards import ModelShards, TpShard
from windlass.plan.speed.roofline import SpeedModel


@dataclass(frozen=True)
class Candidate:
    spec: ModelSpec
    engine: EngineProfile
    scheme: Scheme
    layout: Layout
    workload: Workload
    fit: Fit
    speed: Speed
    imbalance: float = 1.0
    """The time of the device that takes longest for its part over the mean; looked at only where every device is."""

    @property
    def fits(self) -> bool:
        return self.fit.short_bytes == 0


def tp_indices(model: MemoryModel, site: Site, layout: Layout) -> tuple[int, ...]:
    """The ranks of a tp group that stand for all when devices are alike: the first (it has most of every axis), the last, and
    the one whose query heads touch most KV heads."""
    if not site.uniform:
        return tuple(range(layout.tp))
    placement = model.sizes.placement(layout, model.scheme)
    made = next((one for one in placement.cuts if one.name is AxisName.KV_HEADS), None)
    widest = max(range(layout.tp), key=lambda index: made.intervals[index][1] - made.intervals[index][0]) if made else 0
    return tuple(sorted({0, widest, layout.tp - 1}))


def tp_shares(model: MemoryModel, site: Site, layout: Layout, filled: float = 0.97) -> tuple[float, ...]:
    """How much each tp index takes: by bandwidth, since decode reads what it holds, but never more than it has room for.

    `filled`: how far that room is used; heads and groups are coarse, so what is cut may be a little more than was asked for.
    """
    if site.uniform or layout.tp == 1:
        return ()
    groups = [site.devices[first : first + layout.tp] for first in range(0, layout.tp * layout.pp, layout.tp)]
    speeds = [min(group[index].measured_bandwidth for group in groups) for index in range(layout.tp)]
    whole = model.sizes.shard(Layout(), model.scheme)
    layers = (0, model.spec.num_layers)
    needed = (model.weights(whole, layers) + model.kv(whole, layers, layout)) / layout.pp

    def room(device: Device) -> float:
        return device.memory_bytes - model.overhead(device, layout) - model.activations(device, whole, layers, layout)

    rooms = [max(min(room(group[index]) for group in groups), 1.0) for index in range(layout.tp)]
    return water_fill(speeds, [room / needed * filled for room in rooms])


def water_fill(wishes: list[float], limits: list[float]) -> tuple[float, ...]:
    """Shares of one in proportion to `wishes`, none beyond its limit while another has room; by the limits where all are full."""
    if sum(limits) <= 1:
        return tuple(limit / sum(limits) for limit in limits)
    shares = [0.0] * len(wishes)
    open_ = set(range(len(wishes)))
    left = 1.0
    while open_:
        total = sum(wishes[index] for index in open_)
        full = {index for index in open_ if wishes[index] / total * left > limits[index]}
        if not full:
            for index in open_:
                shares[index] = wishes[index] / total * left
            break
        for index in full:
            shares[index] = limits[index]
            left -= limits[index]
        open_ -= full
    return tuple(shares)


def evaluate(
    sizes: ModelShards,
    site: Site,
    engine: EngineProfile,
    scheme: Scheme,
    layout: Layout,
    workload: Workload,
    *,
    spill: bool = False,
    every: bool = False,
) -> Candidate:
    """`spill`: what does not fit goes to host memory and disk. `every`: all devices of the replica, for the plan that is kept."""
    model = MemoryModel(sizes, engine, workload, scheme)
    shares = tp_shares(model, site, layout)
    stages = choose_stages(model, site, layout, shares)
    indices = tuple(range(layout.tp)) if every or spill else tp_indices(model, site, layout)
    fit = fit_layout(model, site, layout, stages, shares, indices)
    if fit.short_bytes and spill and engine.offload:
        fit = offload(fit, model, site.hardware, layout)
    times = SpeedModel(model, site.hardware, layout, fit)
    return Candidate(sizes.spec, engine, scheme, layout, workload, fit, times.speed(), times.imbalance() if every else 1.0)


def choose_stages(model: MemoryModel, site: Site, layout: Layout, shares: tuple[float, ...]) -> tuple[Interval, ...]:
    """Windlass balances bytes over unlike stages; engines that split evenly are taken at their word (vLLM: 80 in 3 is 27, 27, 26)."""
    num_layers = model.spec.num_layers
    if layout.pp == 1 or not model.engine.uneven:
        return stages_of(num_layers, layout.pp)
    shard = model.sizes.shard(layout, model.scheme, 0, shares)
    weights = [shard.between(shard.always, (i, i + 1)) + shard.between(shard.experts, (i, i + 1)) for i in range(num_layers)]
    cached = [model.kv(shard, (i, i + 1), layout) for i in range(num_layers)]
    speeds, rooms = _stage_speeds(model, site, layout, shard)
    head = shard.head_bytes + (shard.embed_bytes if model.spec.tied_head else 0.0)
    held = [weight + kv for weight, kv in zip(weights, cached, strict=True)]
    return balance(held, speeds, rooms, first=shard.embed_bytes, last=head)


def _stage_speeds(model: MemoryModel, site: Site, layout: Layout, shard: TpShard) -> tuple[list[float], list[float]]:
    """Per stage: bandwidth of its slowest member and room for weights and cache of its fullest."""
    layers = (0, model.spec.num_layers)

    def room(device: Device) -> float:
        return device.memory_bytes - model.overhead(device, layout) - model.activations(device, shard, layers, layout)

    groups = [site.devices[pp * layout.tp : (pp + 1) * layout.tp] for pp in range(layout.pp)]
    speeds = [min(device.measured_bandwidth for device in group) for group in groups]
    return speeds, [min(map(room, group)) * 0.98 for group in groups]


def fit_layout(
    model: MemoryModel,
    site: Site,
    layout: Layout,
    stages: tuple[Interval, ...],
    shares: tuple[float, ...],
    indices: tuple[int, ...],
) -> Fit:
    seats = site.seats(layout, indices)
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
    sizes: ModelShards, site: Site, engine: EngineProfile, scheme: Scheme, layout: Layout, workload: Workload
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


def _room_for(found: Candidate, engine: EngineProfile) -> int:
    per_sequence = max(held.kv_bytes for held in found.fit.memory)
    extra = found.fit.free_bytes // per_sequence if per_sequence else engine.max_sequences
    return min(1 + extra, engine.max_sequences)
