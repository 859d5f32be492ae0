"""How the weights of a rank are split between its device and host memory. Pure: the planner and the engine make the same split.

A rank has a pipeline stage: whole layers. Attention, routers, norms, embedding, head and KV cache are on the device, then as many routed experts of
each layer as fit, or slices of feed-forwards where there are none. What goes to disk below host memory: core/tiers/below.py.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from windlass.core.constants import BLOCK_TOKENS
from windlass.core.model import ModelSpec, MoE
from windlass.core.place import Interval
from windlass.core.scheme import kv_token_bytes
from windlass.core.tiers.demand import dense_slices
from windlass.core.tiers.exchange import cpu_blocks
from windlass.core.tiers.misses import Misses
from windlass.core.tiers.placement import SPARE_SLOTS, STAGED_LAYERS, experts_on_device, predicted_seconds
from windlass.core.tiers.steps import offload_step_tokens, row_bytes
from windlass.core.tiers.values import Demand, ExpertPool, Speeds, TierPlacement, in_blocks
from windlass.errors import DoesNotFit, Impossible
from windlass.units import MIB, format_bytes

RING_SLOTS = 8
"""Pinned blocks that experts on disk pass through on their way to the device in steps of many rows: enough reads for a disk, and as many copies."""
OTHER_BYTES = 1536 * MIB
"""Of a device: the driver's context, libraries, captured graphs."""
LOADED_LAYERS = 1
"""Layers of experts beside the slots while they are loaded or made."""
ROUTER_BYTES = 10
"""Of a weight of a router: fp32, and the three parts in bf16 that add up to it (runtime/nn/fused/feed_forward.py)."""
KV_SHARE = 1 / 16
"""Of the device, for a KV cache that was not asked for."""
KV_TOKENS = 64 * 1024
"""No more than these."""


class DeviceSplit(NamedTuple):
    """Of the routed experts of every layer, or of the slices of a dense one."""

    num_layers: int
    num_experts: int
    on_device: int
    """Of each layer."""
    has_shared: bool
    share: float | None = None
    """Of an expert in host memory, the part that the CPU computes. None: as the speeds of CPU and link say, which are measured."""
    on_disk: int = 0
    """Of each layer, the first ones: their home is a file."""
    cache_slots: int = 0
    """In host memory, for experts on disk, shared by all layers."""

    @property
    def off_device(self) -> int:
        return self.num_experts - self.on_device

    @property
    def in_host(self) -> int:
        """Of each layer: their home is host memory."""
        return self.off_device - self.on_disk

    @property
    def num_slots(self) -> int:
        """Of experts on the device, spare ones for experts that move, and two layers' worth of staging."""
        return self.staging + STAGED_LAYERS * self.off_device

    @property
    def routed_slots(self) -> int:
        """Without those of shared experts, whose bytes count among the matrices."""
        return self.num_slots - self.num_layers * self.has_shared

    @property
    def first_spare(self) -> int:
        return self.num_layers * (self.on_device + self.has_shared)

    @property
    def spare(self) -> range:
        """Slots for experts that move. With a disk one of the spare ones stays empty."""
        return range(self.first_spare, self.staging - (self.on_disk > 0))

    @property
    def staging(self) -> int:
        return self.first_spare + SPARE_SLOTS

    @property
    def nothing_slot(self) -> int:
        """Stays zero: the device computes with it for experts on disk. Negative: there are none."""
        return self.staging - 1 if self.on_disk else -1

    def shared_slot(self, layer: int) -> int:
        return self.num_layers * self.on_device + layer * self.has_shared

    def share_blocks(self, blocks: int) -> int:
        return cpu_blocks(self.share or 0.0, blocks)


class ModelStage(NamedTuple):
    """What a rank has of a model: whole layers, first..last."""

    spec: ModelSpec
    """Of the whole model."""
    layers: Interval

    @property
    def part(self) -> ModelSpec:
        return msgspec.structs.replace(self.spec, layers=self.spec.layers[slice(*self.layers)])

    def kv_token_bytes(self, kv_type: str) -> int:
        return kv_token_bytes(self.part, kv_type)


class DeviceNeeds(NamedTuple):
    """What was asked for beside the weights. None: chosen here."""

    kv_type: str = "bf16"
    kv_bytes: int | None = None
    """Of the whole model's cache."""
    context_tokens: int | None = None
    step_tokens: int | None = None


class DeviceLimits(NamedTuple):
    """What a device has room for beside its weights. Ranks of one model take the smallest of all."""

    kv_tokens: int
    step_tokens: int


class DevicePlan(NamedTuple):
    split: DeviceSplit
    first_layer: int
    """Of the model: the first of the rank's with routed experts, or with a part in host memory."""
    kv_bytes: int
    """Of the rank's cache."""
    step_tokens: int
    demand: Demand
    expert_bytes: int
    beside_bytes: int
    """On the device beside weights and KV cache: activations, context, what loading needs."""

    @property
    def host_bytes(self) -> int:
        """Of experts whose home is host memory, and of buffers for those on disk."""
        buffers = self.split.cache_slots + RING_SLOTS if self.split.on_disk else 0
        return self.split.num_layers * self.split.in_host * self.expert_bytes + buffers * in_blocks(self.expert_bytes)

    @property
    def step_disk_bytes(self) -> int:
        """That a decode step reads from disk, with even routing."""
        split, pool = self.split, self.demand.experts
        missing = split.num_layers * split.on_disk - split.cache_slots
        return 0 if pool is None else int(pool.touched * max(missing, 0) * self.expert_bytes)

    @property
    def misses(self) -> Misses:
        return Misses(self.step_disk_bytes, self.expert_bytes, self.split.num_layers)

    @property
    def disk_bytes(self) -> int:
        return self.split.num_layers * self.split.on_disk * in_blocks(self.expert_bytes)

    def placed(self, speeds: Speeds) -> TierPlacement:
        """With the step that these speeds allow."""
        split = self.split
        experts = TierPlacement(
            num_experts=split.num_layers * split.num_experts,
            expert_bytes=self.expert_bytes,
            device_slots=split.num_layers * split.on_device,
            host_slots=split.num_layers * split.in_host + split.cache_slots,
            cache_slots=split.cache_slots,
            disk_experts=split.num_layers * split.on_disk,
            cpu_share=speeds.cpu_share,
            device_bytes=self.demand.fixed_bytes + self.demand.unit_bytes + split.routed_slots * self.expert_bytes,
            host_bytes=self.host_bytes,
            disk_bytes=self.disk_bytes,
        )
        return msgspec.structs.replace(experts, step_seconds=predicted_seconds(self.demand, experts, speeds))


def device_limits(stage: ModelStage, cap_bytes: int, needs: DeviceNeeds) -> DeviceLimits:
    return DeviceLimits(_kv_tokens(stage, cap_bytes, needs), _step_tokens(stage.part, cap_bytes, needs))


def needed_bytes(stage: ModelStage, weight_bytes: int, limits: DeviceLimits, kv_type: str) -> int:
    """Of a device that holds all weights of its rank."""
    rows = limits.step_tokens * _row_bytes(stage.part)
    return weight_bytes + limits.kv_tokens * stage.kv_token_bytes(kv_type) + rows + OTHER_BYTES


def plan_device(
    stage: ModelStage, demand: Demand, cap_bytes: int, limits: DeviceLimits, kv_type: str = "bf16", most: int | None = None
) -> DevicePlan:
    """Everything but experts goes to the device, then as many of each layer as fit, and no more than `most` of all. Raises DoesNotFit."""
    part = stage.part
    moe, first, routers = part.experts, stage.layers[0], 0
    if moe is None:
        demand = _sliced(stage, demand)
    else:
        first += next(index for index, layer in enumerate(part.layers) if isinstance(layer.feed_forward, MoE))
        routers = (stage.layers[1] - first) * ROUTER_BYTES * moe.num_experts * part.hidden_size
    pool = demand.experts
    assert pool is not None
    if moe is not None and (pool.num_layers != stage.layers[1] - first or pool.num_experts != pool.num_layers * moe.num_experts):
        raise Impossible(
            f"{part.name} has layers without experts among those with them, which cannot be kept in host memory beside a GPU yet"
        )
    kv_bytes = limits.kv_tokens * stage.kv_token_bytes(kv_type)
    beside = limits.step_tokens * _row_bytes(part) + OTHER_BYTES + routers
    plan = _plan(part, demand, pool, cap_bytes, kv_bytes, beside, most)
    has_shared = moe is not None and moe.shared_intermediate_size > 0
    return plan._replace(first_layer=first, step_tokens=limits.step_tokens, split=plan.split._replace(has_shared=has_shared))


def _sliced(stage: ModelStage, demand: Demand) -> Demand:
    sliced, width = dense_slices(demand, stage.part, stage.layers[0]), stage.part.layers[0].feed_forward.intermediate_size
    if sliced.experts is None:
        raise Impossible(
            f"the feed-forwards of {stage.spec.name} ({width:,} wide) cannot be kept in host memory beside a GPU yet; use fewer bits, a larger "
            "GPU, or --device cpu"
        )
    return sliced


def _plan(
    part: ModelSpec, demand: Demand, pool: ExpertPool, cap_bytes: int, kv_bytes: int, beside: int, most: int | None
) -> DevicePlan:
    layers, per_layer = pool.num_layers, pool.num_experts // pool.num_layers
    loading = LOADED_LAYERS * per_layer * pool.expert_bytes
    others = demand.fixed_bytes + demand.unit_bytes + kv_bytes + beside
    room = cap_bytes - others - loading
    on_device = experts_on_device(room, layers, per_layer, pool.expert_bytes)
    if on_device < 0:
        short = -room + 2 * per_layer * pool.expert_bytes
        what = "experts" if part.experts is not None else "feed-forwards"
        raise DoesNotFit(
            f"of {format_bytes(max(cap_bytes, 0))} of device memory {format_bytes(others)} are needed beside the {what}, and "
            f"{format_bytes(short)} are missing; lower --context, or use a larger device",
            short,
        )
    if most is not None:
        on_device = min(on_device, most // layers)
    split = DeviceSplit(layers, per_layer, on_device, has_shared=False)
    return DevicePlan(split, 0, kv_bytes, 0, demand, pool.expert_bytes, beside + loading)


def _row_bytes(part: ModelSpec) -> int:
    """Of the activations of a row of a large step."""
    if part.experts is not None:
        return row_bytes(part, part.experts)
    return 3 * part.layers[0].feed_forward.intermediate_size + 30 * part.hidden_size


def _step_tokens(part: ModelSpec, cap_bytes: int, needs: DeviceNeeds) -> int:
    return needs.step_tokens or offload_step_tokens(part, cap_bytes)


def _kv_tokens(stage: ModelStage, cap_bytes: int, needs: DeviceNeeds) -> int:
    """What was asked for; else enough for one prompt of some length, and for several short ones."""
    if needs.kv_bytes is not None:
        return -(-needs.kv_bytes // kv_token_bytes(stage.spec, needs.kv_type))
    some = min(KV_TOKENS, int(cap_bytes * KV_SHARE) // stage.kv_token_bytes(needs.kv_type))
    return -(-max(needs.context_tokens or 0, some) // BLOCK_TOKENS) * BLOCK_TOKENS
