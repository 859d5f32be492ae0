"""Where each rank's weights live when they do not fit its device: the placement that `run` uses, for the plan that was chosen.

The search counts bytes; this places matrices and experts one by one (core/tiers), so a plan that just fits by bytes may fall short here.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from windlass.core.constants import BLOCK_TOKENS
from windlass.core.hardware.spec import Node
from windlass.core.plan import DeviceMemoryPlan, Reason
from windlass.core.rule import Rule
from windlass.core.scheme import kv_token_bytes
from windlass.core.tiers.below import RoomBelow, with_disk
from windlass.core.tiers.budget import GPU_PROCESS_BYTES, LOADING_BYTES, PROCESS_BYTES, activation_bytes
from windlass.core.tiers.demand import demand_of, planned_tensors
from windlass.core.tiers.device import (
    OTHER_BYTES,
    DeviceLimits,
    DeviceNeeds,
    DevicePlan,
    ModelStage,
    device_limits,
    needed_bytes,
    plan_device,
)
from windlass.core.tiers.exchange import FETCHED
from windlass.core.tiers.misses import IN_BURSTS
from windlass.core.tiers.placement import place_tiers
from windlass.core.tiers.values import Demand, Room, Speeds, TierPlacement
from windlass.errors import DoesNotFit
from windlass.tasks.plan.inference.candidates import Candidate
from windlass.tasks.plan.inference.sites import Site
from windlass.tasks.plan.memory import HOST_FRACTION, DeviceSlot, Fit, Offloaded
from windlass.tasks.plan.speed.roofline import SpeedModel
from windlass.units import format_bytes


def with_tiers(found: Candidate, site: Site, rules: tuple[Rule, ...]) -> tuple[Candidate, tuple[TierPlacement, ...]]:
    """The candidate with its memory as it is placed, and the placement of each rank; none where nothing is offloaded."""
    if not found.fits or found.engine.name != "windlass" or not (found.fit.host_bytes or found.fit.disk_bytes):
        return found, ()  # other engines place by their own rules: experts to the host, the rest on the device
    placer = _RankPlacer(found, site, rules)
    try:
        placed = placer.placed()
    except DoesNotFit as error:
        return _with_fit(found, site, replace(found.fit, short_bytes=error.short_bytes)), ()
    ranks = tuple(zip(found.fit.slots, found.fit.memory, placed, strict=True))
    memory = tuple(placer.memory(slot, held, tiers) for slot, held, tiers in ranks)
    offloaded = tuple(_offloaded(tiers, placer.demands[slot.tp, slot.pp]) for slot, _, tiers in ranks)
    free = min(held.capacity_bytes - held.total_bytes for held in memory)
    fit = replace(found.fit, memory=memory, offloaded=offloaded, free_bytes=max(free, 0))
    return _with_fit(found, site, fit), tuple(placed)


def _with_fit(found: Candidate, site: Site, fit: Fit) -> Candidate:
    return replace(found, fit=fit, times=SpeedModel(found.times.model, site.hardware, found.layout, fit))


class _RankPlacer:
    def __init__(self, found: Candidate, site: Site, rules: tuple[Rule, ...]) -> None:
        self._found, self._site, self._rules = found, site, rules
        self._sizes = found.times.model.sizes
        self._ranks: dict[int, int] = {}
        for slot in found.fit.slots:
            self._ranks[slot.node] = self._ranks.get(slot.node, 0) + 1
        self.demands: dict[tuple[int, int], Demand] = {}
        self._plans: dict[int, DevicePlan] = {}
        """Of stages on GPUs that keep weights in host memory."""

    def placed(self) -> list[TierPlacement]:
        slots, memory = self._found.fit.slots, self._found.fit.memory
        limits = self._limits()
        return [self._place(slot, held, limits) for slot, held in zip(slots, memory, strict=True)]

    def _limits(self) -> DeviceLimits:
        """Of all GPUs the smallest, as ranks agree at the start (runtime/engine/tiers.py)."""
        ranks = zip(self._found.fit.slots, self._found.fit.memory, strict=True)
        found = [device_limits(self._stage(slot), self._cap(held), self._needs()) for slot, held in ranks if _is_gpu(slot)]
        return DeviceLimits(*map(min, zip(*found, strict=True))) if found else DeviceLimits(0, 0)

    def _needs(self) -> DeviceNeeds:
        work, spec, kv = self._found.workload, self._found.spec, self._found.scheme.kv
        tokens = -(-work.context_tokens // BLOCK_TOKENS) * BLOCK_TOKENS * -(-work.concurrency // self._found.layout.dp)
        return DeviceNeeds(kv, tokens * kv_token_bytes(spec, kv), work.context_tokens)

    def _stage(self, slot: DeviceSlot) -> ModelStage:
        return ModelStage(self._found.spec, self._found.fit.stages[slot.pp])

    def _cap(self, held: DeviceMemoryPlan) -> int:
        return int(held.capacity_bytes * self._found.engine.memory_fraction)

    def _place(self, slot: DeviceSlot, held: DeviceMemoryPlan, limits: DeviceLimits) -> TierPlacement:
        node = self._site.hardware.nodes[slot.node]
        demand = self.demands[slot.tp, slot.pp] = self._demand(slot)
        speeds = _speeds(slot, node, self._ranks[slot.node], 1.0 if self._found.spec.experts is None else FETCHED)
        if not _is_gpu(slot):
            return place_tiers(demand, self._room(held, node, slot), speeds)
        return self._beside_gpu(slot, held, demand, limits, speeds, self._below(node, self._ranks[slot.node]))

    def _below(self, node: Node, sharing: int) -> RoomBelow:
        """Host memory and disk of a rank on a GPU, beside its process. The disk is for experts alone."""
        disk = node.disk_bytes // sharing if self._found.spec.experts is not None else 0
        each = node.ram_bytes / sharing
        return RoomBelow(max(int(min(each * HOST_FRACTION, each - GPU_PROCESS_BYTES - LOADING_BYTES)), 0), disk)

    def _beside_gpu(
        self, slot: DeviceSlot, held: DeviceMemoryPlan, demand: Demand, limits: DeviceLimits, speeds: Speeds, room: RoomBelow
    ) -> TierPlacement:
        stage, cap, kv = self._stage(slot), self._cap(held), self._found.scheme.kv
        if needed_bytes(stage, demand.total_bytes, limits, kv) <= cap:
            return TierPlacement(device_bytes=demand.total_bytes)
        plan = self._plans[slot.pp] = with_disk(plan_device(stage, demand, cap, limits, kv), room)
        self.demands[slot.tp, slot.pp] = plan.demand
        return plan.placed(speeds)

    def _demand(self, slot: DeviceSlot) -> Demand:
        found = self._found
        placement = self._sizes.placement(found.layout, found.scheme, found.fit.shares)
        layers = found.fit.stages[slot.pp]
        tensors = planned_tensors(self._rules, found.spec, placement, found.layout, found.scheme, slot.tp, layers)
        return demand_of(tensors, found.spec, batch=-(-found.workload.concurrency // found.layout.dp))

    def _room(self, held: DeviceMemoryPlan, node: Node, slot: DeviceSlot) -> Room:
        beside = PROCESS_BYTES + LOADING_BYTES + self._activation_bytes() + held.kv_bytes
        return Room(host=max(held.capacity_bytes - beside, 0), disk=node.disk_bytes // self._ranks[slot.node])

    def memory(self, slot: DeviceSlot, held: DeviceMemoryPlan, placed: TierPlacement) -> DeviceMemoryPlan:
        """Weights and buffers of the first tier, and the rest as the engine counts it."""
        weights, kv_bytes = placed.device_bytes or placed.host_bytes, held.kv_bytes
        activations, overhead = self._activation_bytes(), PROCESS_BYTES + LOADING_BYTES
        if _is_gpu(slot):
            plan = self._plans.get(slot.pp)
            activations, overhead = held.activation_bytes, held.overhead_bytes
            if plan is not None:
                kv_bytes = plan.kv_bytes
                activations, overhead = plan.beside_bytes - OTHER_BYTES, OTHER_BYTES + held.capacity_bytes - self._cap(held)
        return msgspec.structs.replace(
            held,
            weights_bytes=weights,
            kv_bytes=kv_bytes,
            activation_bytes=activations,
            overhead_bytes=overhead,
            total_bytes=weights + kv_bytes + activations + overhead,
        )

    def _activation_bytes(self) -> int:
        return activation_bytes(self._found.spec, -(-self._found.workload.concurrency // self._found.layout.dp))


def _is_gpu(slot: DeviceSlot) -> bool:
    return slot.device.kind != "cpu"


def _speeds(slot: DeviceSlot, node: Node, sharing: int, fetched: float) -> Speeds:
    """Ranks of a node share its memory, links to it and disk. `fetched`: of what a link carries, beside the CPU's reads."""
    disk = node.disk_bandwidth / sharing
    if slot.device.kind == "cpu":
        return Speeds(host=slot.device.measured_bandwidth, disk=disk)
    link = min(fetched * (slot.device.host_bandwidth or node.ram_bandwidth), node.ram_bandwidth / sharing)
    return Speeds(
        device=slot.device.measured_bandwidth,
        link=link,
        host=max(node.ram_bandwidth / sharing - link, 1.0),
        disk=disk * IN_BURSTS,
    )


def _offloaded(placed: TierPlacement, demand: Demand) -> Offloaded:
    """For the speed model: what a step reads of each tier."""
    sizes = {unit.name: unit.num_bytes for unit in demand.units}
    missing = placed.num_experts - placed.device_slots - placed.host_slots if placed.disk_experts else 0
    return Offloaded(
        host_experts=placed.host_slots * placed.expert_bytes if placed.device_bytes else 0,
        host_always=sum(sizes[name] for name in placed.host_units),
        disk_experts=missing * placed.expert_bytes,
        disk_always=sum(sizes[name] for name in placed.disk_units),
    )


def tier_reasons(tiers: tuple[TierPlacement, ...], *, has_experts: bool) -> list[Reason]:
    """What of the fullest rank lives where. Without experts, slices of feed-forwards take their place."""
    if not tiers:
        return []
    fullest = max(tiers, key=lambda one: one.disk_bytes + one.host_bytes)
    made: list[Reason] = []
    for place, names in (("host memory", fullest.host_units), ("disk", fullest.disk_units)):
        if names:
            why = f"read from {place} every step, spread evenly over the layers, through buffers of {format_bytes(fullest.ring_bytes)}"
            made.append(Reason(choice="streamed", value=f"{len(names):,} matrices", why=why))
    slots = [
        (fullest.device_slots, "on the device"),
        (fullest.host_slots - fullest.cache_slots, "in host memory"),
        (fullest.cache_slots, "at a time in a cache in host memory"),
    ]
    shown = ", ".join(f"{count:,} {where}" for count, where in slots if count)
    if fullest.disk_experts or (fullest.device_bytes and fullest.num_experts):
        why = f"of {fullest.num_experts:,}; {_when_used(fullest, has_experts)}"
        why += f"; on the fullest of {len(tiers)} ranks" if len(tiers) > 1 else ""
        made.append(Reason(choice="experts" if has_experts else "slices of feed-forwards", value=shown, why=why))
    return made


def _when_used(placed: TierPlacement, has_experts: bool) -> str:
    """Of experts, or slices, that are not in the first tier."""
    if not has_experts:
        return "the others are computed by CPU and GPU together in every step"
    if not placed.disk_experts:
        return "the others are computed by CPU and GPU together when a token needs them"
    if not placed.device_bytes:
        return "the others are read from disk when a token needs them"
    return f"{placed.disk_experts:,} are on disk, from where the CPU reads those that a token needs and the cache has not, and computes them"
