"""Bytes on every device of a layout: weights from the rules, KV, activations, the engine's own; and what must go to slower tiers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from windlass.core.hardware.spec import Device, Hardware
from windlass.core.layout import Layout
from windlass.core.place import Interval
from windlass.core.plan import DeviceMemoryPlan
from windlass.core.scheme import Scheme
from windlass.core.workload import Workload
from windlass.plan.engines import ACTIVATION_BYTES, CPU_ACTIVATION_BYTES, CPU_CONTEXT_BYTES, CPU_STEP_TOKENS, EngineProfile
from windlass.plan.shards import ModelShards, TpShard

HOST_FRACTION = 0.9
"""Of a node's memory that weights may fill; the rest is the system's and the page cache's."""


@dataclass(frozen=True)
class DeviceSlot:
    """One device of one replica: where it sits and what it is."""

    device: Device
    node: int
    tp: int
    pp: int


@dataclass(frozen=True)
class Offloaded:
    """Weights of one device that live elsewhere. Experts leave first: a step reads only some of them."""

    host_experts: float = 0.0
    host_always: float = 0.0
    disk_experts: float = 0.0
    disk_always: float = 0.0

    @property
    def host(self) -> float:
        return self.host_experts + self.host_always

    @property
    def disk(self) -> float:
        return self.disk_experts + self.disk_always


@dataclass(frozen=True)
class Fit:
    """How one replica sits in its devices."""

    seats: tuple[DeviceSlot, ...]
    memory: tuple[DeviceMemoryPlan, ...]
    offloaded: tuple[Offloaded, ...]
    short_bytes: int
    """What the fullest device (or its node's last tier) still lacks."""
    free_bytes: int
    """Left on the fullest device."""
    stages: tuple[Interval, ...]
    shares: tuple[float, ...] = field(default=())

    @property
    def host_bytes(self) -> int:
        return round(sum(part.host for part in self.offloaded))

    @property
    def disk_bytes(self) -> int:
        return round(sum(part.disk for part in self.offloaded))


def round_up(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens) * block_tokens


class MemoryModel:
    """Sizes of one model under one engine and workload."""

    def __init__(self, sizes: ModelShards, engine: EngineProfile, workload: Workload, scheme: Scheme) -> None:
        self.sizes, self.engine, self.workload, self.scheme = sizes, engine, workload, scheme
        self.spec = sizes.spec

    def sequences(self, layout: Layout) -> int:
        return -(-self.workload.concurrency // layout.dp)

    def weights(self, shard: TpShard, layers: Interval) -> float:
        held = shard.between(shard.always, layers) + shard.between(shard.experts, layers)
        return held + self.embed_bytes(shard, layers) + (shard.head_bytes if self.is_last(layers) else 0.0)

    def embed_bytes(self, shard: TpShard, layers: Interval) -> float:
        """On the first stage; a tied head needs the table on the last one too."""
        needed = layers[0] == 0 or (self.is_last(layers) and self.spec.tied_head)
        return shard.embed_bytes if needed else 0.0

    def is_last(self, layers: Interval) -> bool:
        return layers[1] == self.spec.num_layers

    def kv(self, shard: TpShard, layers: Interval, layout: Layout) -> float:
        tokens = round_up(self.workload.reserve_tokens, self.engine.block_tokens)
        one = self.sizes.cache_bytes(layers, tokens, self.scheme, self.engine.windowed_cache)
        return one * shard.kv_share * self.sequences(layout)

    def activations(self, device: Device, shard: TpShard, layers: Interval, layout: Layout) -> float:
        """A step's tokens: residual, normed input, a layer's widest output and its input again; logits in fp32."""
        on_cpu = device.kind == "cpu"
        largest = CPU_STEP_TOKENS if on_cpu else self.engine.step_tokens
        sequences = self.sequences(layout)
        tokens = max(min(largest, self.workload.context_tokens * (sequences if on_cpu else 1)), sequences)
        logits = sequences * shard.vocab * 4 if self.is_last(layers) else 0
        element_bytes = CPU_ACTIVATION_BYTES if on_cpu else ACTIVATION_BYTES
        return tokens * (4 * self.spec.hidden_size + 2 * shard.widest) * element_bytes + logits

    def overhead(self, device: Device, layout: Layout) -> float:
        kept_free = (1 - self.engine.memory_fraction) * device.memory_bytes
        context = CPU_CONTEXT_BYTES if device.kind == "cpu" else self.engine.context_bytes
        talking = layout.tp * layout.pp > 1 and device.kind != "cpu"
        return kept_free + context + (self.engine.group_bytes if talking else 0)

    def device_memory(self, seat: DeviceSlot, shard: TpShard, layers: Interval, layout: Layout) -> DeviceMemoryPlan:
        parts = [
            round(part)
            for part in (
                self.weights(shard, layers),
                self.kv(shard, layers, layout),
                self.activations(seat.device, shard, layers, layout),
                self.overhead(seat.device, layout),
            )
        ]
        return DeviceMemoryPlan(
            name=seat.device.name,
            weights_bytes=parts[0],
            kv_bytes=parts[1],
            activation_bytes=parts[2],
            overhead_bytes=parts[3],
            total_bytes=sum(parts),
            capacity_bytes=seat.device.memory_bytes,
        )


def offload(fit: Fit, model: MemoryModel, hardware: Hardware, layout: Layout) -> Fit:
    """Moves what does not fit to host memory, then to disk; a device that computes from host memory has only its disk."""
    import msgspec

    room = {node: _host_room(hardware, node) for node in {seat.node for seat in fit.seats}}
    disk = {node: float(hardware.nodes[node].disk_bytes) for node in room}
    moved: list[Offloaded] = []
    memory: list[DeviceMemoryPlan] = []
    short: dict[int, float] = defaultdict(float)
    for seat, held in zip(fit.seats, fit.memory, strict=True):
        shard = model.sizes.shard(layout, model.scheme, seat.tp, fit.shares)
        layers = fit.stages[seat.pp]
        over = max(held.total_bytes - held.capacity_bytes, 0)
        over += _staging_bytes(shard, layers) if over else 0
        over = min(over, held.weights_bytes)
        part = _to_tiers(over, shard.between(shard.experts, layers), room, disk, seat)
        missing = over - part.host - part.disk + max(held.total_bytes - over - held.capacity_bytes, 0)
        short[seat.node] += missing
        stays = held.weights_bytes - round(over)
        memory.append(msgspec.structs.replace(held, weights_bytes=stays, total_bytes=held.total_bytes - round(over)))
        moved.append(part)
    free = min(held.capacity_bytes - held.total_bytes for held in memory)
    return Fit(
        seats=fit.seats,
        memory=tuple(memory),
        offloaded=tuple(moved),
        short_bytes=round(max(short.values(), default=0.0)),
        free_bytes=max(free, 0),
        stages=fit.stages,
        shares=fit.shares,
    )


def _host_room(hardware: Hardware, node: int) -> float:
    found = hardware.nodes[node]
    return 0.0 if any(device.kind == "cpu" for device in found.devices) else found.ram_bytes * HOST_FRACTION


def _staging_bytes(shard: TpShard, layers: Interval) -> float:
    """Two layers' worth of buffer: one computes while the next arrives."""
    per_layer = (shard.between(shard.always, layers) + shard.between(shard.experts, layers)) / max(layers[1] - layers[0], 1)
    return 2 * per_layer


def _to_tiers(over: float, experts: float, room: dict[int, float], disk: dict[int, float], seat: DeviceSlot) -> Offloaded:
    expert_bytes = min(over, experts)
    always_bytes = over - expert_bytes
    host_always = min(always_bytes, room[seat.node])
    host_experts = min(expert_bytes, room[seat.node] - host_always)
    room[seat.node] -= host_always + host_experts
    disk_always = min(always_bytes - host_always, disk[seat.node])
    disk_experts = min(expert_bytes - host_experts, disk[seat.node] - disk_always)
    disk[seat.node] -= disk_always + disk_experts
    return Offloaded(host_experts=host_experts, host_always=host_always, disk_experts=disk_experts, disk_always=disk_always)
