"""One layout evaluated: device assignment, memory and speed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from windlass.core.hardware.spec import Device
from windlass.core.layout import Layout
from windlass.core.model import ModelSpec
from windlass.core.place import Interval, stages_of
from windlass.core.plan import Speed
from windlass.core.rule import AxisName
from windlass.core.scheme import Scheme
from windlass.core.workload import Workload
from windlass.tasks.plan.engines.load import rates_on
from windlass.tasks.plan.engines.profile import EngineProfile
from windlass.tasks.plan.inference.sites import Site
from windlass.tasks.plan.inference.stages import balance
from windlass.tasks.plan.memory import Fit, MemoryModel, Offloaded, offload
from windlass.tasks.plan.shards import ModelShards, TpShard
from windlass.tasks.plan.speed.kernels import applies
from windlass.tasks.plan.speed.roofline import SpeedModel
from windlass.tasks.plan.speed.serving import speed


@dataclass(frozen=True)
class Candidate:
    spec: ModelSpec
    engine: EngineProfile
    scheme: Scheme
    layout: Layout
    workload: Workload
    fit: Fit
    times: SpeedModel = field(compare=False, repr=False)
    imbalance: float = 1.0
    """Time of the slowest device over the mean; computed only if every device is evaluated."""

    @cached_property
    def speed(self) -> Speed:
        """Worked out when somebody asks: most candidates of a search do not fit, and nobody asks how quick those are."""
        return speed(self.times)

    @property
    def fits(self) -> bool:
        return self.fit.short_bytes == 0


def tp_indices(model: MemoryModel, site: Site, layout: Layout) -> tuple[int, ...]:
    """Representative ranks of a tp group of equal devices: the first (it has the largest part of every axis), the last, and the one
    whose query heads need the most KV heads."""
    if not site.uniform:
        return tuple(range(layout.tp))
    placement = model.sizes.placement(layout, model.scheme)
    made = next((one for one in placement.cuts if one.name is AxisName.KV_HEADS), None)
    widest = max(range(layout.tp), key=lambda index: made.intervals[index][1] - made.intervals[index][0]) if made else 0
    return tuple(sorted({0, widest, layout.tp - 1}))


def tp_shares(model: MemoryModel, site: Site, layout: Layout, filled: float = 0.97) -> tuple[float, ...]:
    """Fraction of the model for each tp index: proportional to bandwidth, since decode is bound by it, and limited by memory.

    `filled`: fraction of the memory to use; heads and groups are coarse, so the actual split may exceed the target a little.
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
    """Fractions that sum to 1, proportional to `wishes` but capped by `limits`; proportional to the limits if all are full."""
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
    """`spill`: offload what does not fit to host memory and disk. `every`: evaluate all devices of the replica, for the final plan."""
    model = MemoryModel(sizes, engine, workload, scheme)
    shares = tp_shares(model, site, layout)
    stages = choose_stages(model, site, layout, shares)
    indices = tuple(range(layout.tp)) if every or spill else tp_indices(model, site, layout)
    fit = fit_layout(model, site, layout, stages, shares, indices)
    if fit.short_bytes and spill and engine.offload and not why_not_offloaded(model, fit, layout):
        fit = offload(fit, model, site.hardware, layout)
    times = SpeedModel(model, site.hardware, layout, fit)
    return Candidate(sizes.spec, engine, scheme, layout, workload, fit, times, times.imbalance() if every else 1.0)


def why_not_offloaded(model: MemoryModel, fit: Fit, layout: Layout) -> str:
    """Of our engine beside GPUs: why weights cannot lie in host memory; empty: they can."""
    devices = [slot.device for slot in fit.slots if slot.device.kind != "cpu"]
    if model.engine.name != "windlass" or not devices:
        return ""
    if layout.tp > 1:
        return f"with tp {layout.tp} a GPU has parts of layers, and only whole layers can be kept in host memory; use --pp"
    if not all(applies(model.spec, model.scheme, device) for device in devices):
        return "beside a GPU, Windlass offloads only 4-bit weights of models that its Hopper kernels support"
    return ""


def choose_stages(model: MemoryModel, site: Site, layout: Layout, shares: tuple[float, ...]) -> tuple[Interval, ...]:
    """Windlass balances stages by bytes and device speed; other engines split evenly (vLLM: 80 layers in 3 stages are 27, 27, 26)."""
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
    """Per stage: bandwidth of its slowest device, and free memory of its fullest."""
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
    slots = site.slots(layout, indices)
    memory = tuple(
        model.device_memory(slot, model.sizes.shard(layout, model.scheme, slot.tp, shares), stages[slot.pp], layout)
        for slot in slots
    )
    worst = max(held.total_bytes - held.capacity_bytes for held in memory)
    return Fit(
        slots=slots,
        memory=memory,
        offloaded=(Offloaded(),) * len(slots),
        short_bytes=max(worst, 0),
        free_bytes=max(-worst, 0),
        stages=stages,
        shares=shares,
    )


def most_sequences(
    sizes: ModelShards, site: Site, engine: EngineProfile, scheme: Scheme, layout: Layout, workload: Workload
) -> Candidate | None:
    """With as many sequences as fit in memory; None if not even one of full length fits.

    A paged cache holds what sequences have written so far: on average a prompt and half an answer each; some engines reserve the whole answer.
    """
    single = msgspec.structs.replace(workload, concurrency=layout.dp)
    found = evaluate(sizes, site, engine, scheme, layout, single)
    if not found.fits:
        return None
    whole = workload.prompt_tokens + workload.new_tokens
    held = whole if engine.reserves_whole else round(workload.mean_decode_context)
    mean = msgspec.structs.replace(workload, reserve_tokens=held)
    count = _room_for(evaluate(sizes, site, engine, scheme, layout, msgspec.structs.replace(mean, concurrency=layout.dp)), engine)
    while count > 1:  # logits and activations grow with the sequences too, so the first estimate may be slightly too high
        grown = evaluate(sizes, site, engine, scheme, layout, msgspec.structs.replace(mean, concurrency=count * layout.dp))
        if grown.fits:
            return grown
        count = min(count - 1, int(count * 0.97))
    return found


def queued(
    sizes: ModelShards, site: Site, engine: EngineProfile, scheme: Scheme, layout: Layout, workload: Workload
) -> Candidate | None:
    """With as many of the requested sequences as memory holds; the others wait for their turn, as every server makes them.

    Sequences take what they have written so far, so more run at once than would at full length; None if not even one of full length fits.
    """
    found = most_sequences(sizes, site, engine, scheme, layout, workload)
    if found is None:
        return None
    running = min(found.workload.concurrency, workload.concurrency)
    changed = msgspec.structs.replace(found.workload, concurrency=running, waiting=workload.concurrency - running)
    return evaluate(sizes, site, engine, scheme, layout, changed)


def _room_for(found: Candidate, engine: EngineProfile) -> int:
    per_sequence = max(held.kv_bytes for held in found.fit.memory)
    extra = found.fit.free_bytes // per_sequence if per_sequence else _most(found, engine)
    return min(1 + extra, _most(found, engine))


def _most(found: Candidate, engine: EngineProfile) -> int:
    """Sequences that the engine takes at once by default, on its smallest device."""
    return min(rates_on(engine, slot.device).max_sequences or engine.max_sequences for slot in found.fit.slots)
