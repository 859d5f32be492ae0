"""Memory of every device of a layout: weights, KV cache, activations, engine overhead; and what is offloaded to host memory or disk."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from windlass.core.hardware.spec import Device, Hardware
from windlass.core.layout import Layout
from windlass.core.place import Interval
from windlass.core.plan import DeviceMemoryPlan
from windlass.core.scheme import Scheme
from windlass.core.workload import Workload
from windlass.tasks.plan.engines.load import rates_on
from windlass.tasks.plan.engines.profile import (
    ACTIVATION_BYTES,
    CPU_ACTIVATION_BYTES,
    CPU_CONTEXT_BYTES,
    CPU_STEP_TOKENS,
    EngineProfile,
)
from windlass.tasks.plan.shards import ModelShards, TpShard

HOST_FRACTION = 0.9
"""Fraction of host memory that weights may fill; the rest is for the system and the page cache."""
MAPPED_FRACTION = 0.97
"""The same where weights are mapped from their file: they are the page cache."""


@dataclass(frozen=True)
class DeviceSlot:
    """One device of one replica, with its tp and pp index."""

    device: Device
    node: int
    tp: int
    pp: int


@dataclass(frozen=True)
class Offloaded:
    """Offloaded weights of one device. Experts are offloaded first, because a step reads only some of them."""

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
    """Memory of one replica on its devices."""

    slots: tuple[DeviceSlot, ...]
    memory: tuple[DeviceMemoryPlan, ...]
    offloaded: tuple[Offloaded, ...]
    short_bytes: int
    """Bytes missing on the fullest device, after offloading; 0 if it fits."""
    free_bytes: int
    """Free on the fullest device."""
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
    """Memory use of one model under one engine and workload."""

    def __init__(self, sizes: ModelShards, engine: EngineProfile, workload: Workload, scheme: Scheme) -> None:
        self.sizes, self.engine, self.workload, self.scheme = sizes, engine, workload, scheme
        self.spec = sizes.spec

    def sequences(self, layout: Layout) -> int:
        return -(-self.workload.concurrency // layout.dp)

    def weights(self, shard: TpShard, layers: Interval) -> float:
        held = shard.between(shard.always, layers) + shard.between(shard.experts, layers)
        return held + self.embed_bytes(shard, layers) + (shard.head_bytes if self.is_last(layers) else 0.0)

    def embed_bytes(self, shard: TpShard, layers: Interval) -> float:
        """On the first stage; with tied embeddings on the last stage too."""
        needed = layers[0] == 0 or (self.is_last(layers) and self.spec.tied_head)
        return shard.embed_bytes if needed else 0.0

    def is_last(self, layers: Interval) -> bool:
        return layers[1] == self.spec.num_layers

    def kv(self, shard: TpShard, layers: Interval, layout: Layout) -> float:
        tokens = round_up(self.workload.reserve_tokens, self.engine.block_tokens)
        one = self.sizes.cache_bytes(layers, tokens, self.scheme, self.engine.windowed_cache)
        return one * shard.kv_share * self.sequences(layout)

    def activations(self, device: Device, shard: TpShard, layers: Interval, layout: Layout) -> float:
        """Per token of a step: residual, normed input, the widest layer output and its input; plus logits in fp32."""
        on_cpu = device.kind == "cpu"
        largest = CPU_STEP_TOKENS if on_cpu else self.step_tokens(device)
        sequences = self.sequences(layout)
        tokens = max(min(largest, self.workload.context_tokens * (sequences if on_cpu else 1)), sequences)
        logits = sequences * shard.vocab * 4 if self.is_last(layers) else 0
        element_bytes = CPU_ACTIVATION_BYTES if on_cpu else ACTIVATION_BYTES
        return tokens * (4 * self.spec.hidden_size + 2 * shard.widest) * element_bytes + logits

    def step_tokens(self, device: Device) -> int:
        """Prompt tokens of a step: some engines take fewer on smaller cards."""
        return rates_on(self.engine, device).step_tokens or self.engine.step_tokens

    def overhead(self, device: Device, layout: Layout) -> float:
        kept_free = (1 - self.engine.memory_fraction) * device.memory_bytes
        context = CPU_CONTEXT_BYTES if device.kind == "cpu" else self.engine.context_bytes
        has_group = layout.tp * layout.pp > 1 and device.kind != "cpu"
        return kept_free + context + (self.engine.group_bytes if has_group else 0)

    def device_memory(self, slot: DeviceSlot, shard: TpShard, layers: Interval, layout: Layout) -> DeviceMemoryPlan:
        parts = [
            round(part)
            for part in (
                self.weights(shard, layers),
                self.kv(shard, layers, layout),
                self.activations(slot.device, shard, layers, layout),
                self.overhead(slot.device, layout),
            )
        ]
        return DeviceMemoryPlan(
            name=slot.device.name,
            weights_bytes=parts[0],
            kv_bytes=parts[1],
            activation_bytes=parts[2],
            overhead_bytes=parts[3],
            total_bytes=sum(parts),
            capacity_bytes=slot.device.memory_bytes,
        )


def offload(fit: Fit, model: MemoryModel, hardware: Hardware, layout: Layout) -> Fit:
    """Offloads what does not fit to host memory, then to disk. On a CPU the only slower tier is disk."""
    import msgspec

    room = {
        node: _host_room(hardware, node, MAPPED_FRACTION if model.engine.cpu_layers else HOST_FRACTION)
        for node in {slot.node for slot in fit.slots}
    }
    disk = {node: _disk_room(hardware, node, model) for node in room}
    moved: list[Offloaded] = []
    memory: list[DeviceMemoryPlan] = []
    short: dict[int, float] = defaultdict(float)
    for slot, held in zip(fit.slots, fit.memory, strict=True):
        shard = model.sizes.shard(layout, model.scheme, slot.tp, fit.shares)
        layers = fit.stages[slot.pp]
        over = max(held.total_bytes - held.capacity_bytes, 0)
        over += _staging_bytes(shard, layers) if over and not model.engine.cpu_layers else 0
        over = min(over, held.weights_bytes)
        part = _to_tiers(over, shard.between(shard.experts, layers), room, disk, slot)
        missing = over - part.host - part.disk + max(held.total_bytes - over - held.capacity_bytes, 0)
        short[slot.node] += missing
        stays = held.weights_bytes - round(over)
        memory.append(msgspec.structs.replace(held, weights_bytes=stays, total_bytes=held.total_bytes - round(over)))
        moved.append(part)
    free = min(held.capacity_bytes - held.total_bytes for held in memory)
    return Fit(
        slots=fit.slots,
        memory=tuple(memory),
        offloaded=tuple(moved),
        short_bytes=round(max(short.values(), default=0.0)),
        free_bytes=max(free, 0),
        stages=fit.stages,
        shares=fit.shares,
    )


def _host_room(hardware: Hardware, node: int, fraction: float) -> float:
    found = hardware.nodes[node]
    return 0.0 if any(device.kind == "cpu" for device in found.devices) else found.ram_bytes * fraction


def _disk_room(hardware: Hardware, node: int, model: MemoryModel) -> float:
    """Beside a GPU our engine has a disk below host memory for experts alone."""
    found, is_dense = hardware.nodes[node], model.spec.experts is None
    no_disk = model.engine.name == "windlass" and is_dense and any(device.kind != "cpu" for device in found.devices)
    return 0.0 if no_disk else float(found.disk_bytes)


def _staging_bytes(shard: TpShard, layers: Interval) -> float:
    """A double buffer: one layer computes while the next is loaded."""
    per_layer = (shard.between(shard.always, layers) + shard.between(shard.experts, layers)) / max(layers[1] - layers[0], 1)
    return 2 * per_layer


def _to_tiers(over: float, experts: float, room: dict[int, float], disk: dict[int, float], slot: DeviceSlot) -> Offloaded:
    expert_bytes = min(over, experts)
    always_bytes = over - expert_bytes
    host_always = min(always_bytes, room[slot.node])
    host_experts = min(expert_bytes, room[slot.node] - host_always)
    room[slot.node] -= host_always + host_experts
    disk_always = min(always_bytes - host_always, disk[slot.node])
    disk_experts = min(expert_bytes - host_experts, disk[slot.node] - disk_always)
    disk[slot.node] -= disk_always + disk_experts
    return Offloaded(host_experts=host_experts, host_always=host_always, disk_experts=disk_experts, disk_always=disk_always)
