"""How the experts of a model are split between a device and host memory. Numbers only, but for what is free."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from windlass.core.constants import BLOCK_TOKENS
from windlass.core.launch import Launch
from windlass.core.model import ModelSpec, MoE, kv_bytes_per_token
from windlass.core.scheme import KV_BYTES
from windlass.core.tiers.demand import dense_slices
from windlass.core.tiers.placement import experts_on_device, predicted_seconds
from windlass.core.tiers.steps import DENSE_STEP_TOKENS, most_step_tokens, row_bytes
from windlass.core.tiers.values import Demand, ExpertPool, Speeds, TierPlacement
from windlass.errors import DoesNotFit, Impossible
from windlass.offload.device.weights import DeviceSplit
from windlass.offload.placement import host_budget
from windlass.units import MIB, format_bytes

OTHER_BYTES = 1536 * MIB
"""Of a device: the driver's context, libraries, captured graphs."""
LOADED_LAYERS = 1
"""Layers of experts beside the slots while they are loaded or made."""
ROUTER_BYTES = 10
"""Of a weight of a router: fp32, and the three parts in bf16 that add up to it (nn/fused/feed_forward.py)."""
KV_SHARE = 1 / 16
"""Of the device, for a KV cache that was not asked for."""
KV_TOKENS = 64 * 1024
"""No more than these."""


class DevicePlan(NamedTuple):
    split: DeviceSplit
    first_layer: int
    """The first with routed experts."""
    kv_bytes: int
    step_tokens: int
    demand: Demand
    expert_bytes: int

    @property
    def host_bytes(self) -> int:
        return self.split.num_layers * self.split.in_host * self.expert_bytes

    def placed(self, speeds: Speeds) -> TierPlacement:
        """With the step that these speeds allow."""
        split = self.split
        experts = TierPlacement(
            num_experts=split.num_layers * split.num_experts,
            expert_bytes=self.expert_bytes,
            device_slots=split.num_layers * split.on_device,
            host_slots=split.num_layers * split.in_host,
            cpu_share=speeds.cpu_share,
            device_bytes=self.demand.fixed_bytes + self.demand.unit_bytes + split.num_slots * self.expert_bytes,
            host_bytes=self.host_bytes,
        )
        return msgspec.structs.replace(experts, step_seconds=predicted_seconds(self.demand, experts, speeds))


def plan_device(spec: ModelSpec, demand: Demand, cap_bytes: int, launch: Launch) -> DevicePlan:
    """Everything but experts goes to the device, then as many experts of each layer as fit, or as were planned. Raises DoesNotFit."""
    moe, pool = spec.experts, demand.experts
    assert moe is not None and pool is not None
    first = next(index for index, layer in enumerate(spec.layers) if isinstance(layer.feed_forward, MoE))
    layers, per_layer = spec.num_layers - first, pool.num_experts // (spec.num_layers - first)
    if pool.num_layers != layers or per_layer != moe.num_experts:
        raise Impossible(
            f"{spec.name} has layers without experts among those with them, which cannot be kept in host memory beside a GPU yet"
        )
    routers = layers * ROUTER_BYTES * moe.num_experts * spec.hidden_size
    plan = _plan(spec, demand, pool, cap_bytes, launch, row_bytes(spec, moe), routers)
    return plan._replace(first_layer=first, split=plan.split._replace(has_shared=moe.shared_intermediate_size > 0))


def plan_dense(spec: ModelSpec, demand: Demand, cap_bytes: int, launch: Launch) -> DevicePlan:
    """The same for a model without experts: slices of its feed-forwards take their place. Raises DoesNotFit."""
    sliced, width = dense_slices(demand, spec), spec.layers[0].feed_forward.intermediate_size
    if sliced.experts is None:
        raise Impossible(
            f"the feed-forwards of {spec.name} ({width:,} wide) cannot be kept in host memory beside a GPU yet; use fewer bits, a larger GPU, "
            "or --device cpu"
        )
    launch = msgspec.structs.replace(launch, max_step_tokens=launch.max_step_tokens or DENSE_STEP_TOKENS)
    return _plan(spec, sliced, sliced.experts, cap_bytes, launch, 3 * width + 30 * spec.hidden_size, 0)


def _plan(
    spec: ModelSpec, demand: Demand, pool: ExpertPool, cap_bytes: int, launch: Launch, bytes_of_row: int, routers: int
) -> DevicePlan:
    layers, per_layer = pool.num_layers, pool.num_experts // pool.num_layers
    kv_bytes, step_tokens = (
        _kv_bytes(spec, launch, cap_bytes),
        launch.max_step_tokens or most_step_tokens(bytes_of_row, cap_bytes),
    )
    others = demand.fixed_bytes + demand.unit_bytes + kv_bytes + step_tokens * bytes_of_row + OTHER_BYTES + routers
    room = cap_bytes - others - LOADED_LAYERS * per_layer * pool.expert_bytes
    on_device = experts_on_device(room, layers, per_layer, pool.expert_bytes)
    if on_device < 0:
        short = -room + 2 * per_layer * pool.expert_bytes
        what = "experts" if spec.experts is not None else "feed-forwards"
        raise DoesNotFit(
            f"of {format_bytes(cap_bytes)} of device memory {format_bytes(others)} are needed beside the {what}, and "
            f"{format_bytes(short)} are missing; lower --context, or use a larger device",
            short,
        )
    if launch.tiers and launch.tiers[0].num_experts:
        on_device = min(on_device, launch.tiers[0].device_slots // layers)
    split = DeviceSplit(layers, per_layer, on_device, False)
    return DevicePlan(split, 0, kv_bytes, step_tokens, demand, pool.expert_bytes)


def check_host(launch: Launch, num_bytes: int) -> None:
    left = host_budget(launch, 0).weight_bytes
    if num_bytes > left:
        raise DoesNotFit(
            f"{format_bytes(num_bytes)} of weights do not fit the device, and {format_bytes(max(left, 0))} of host memory are free for them: "
            f"{format_bytes(num_bytes - left)} short; raise --host-memory or --gpu-memory, or use fewer bits (--quant int4)",
            num_bytes - left,
        )


def _kv_bytes(spec: ModelSpec, launch: Launch, cap_bytes: int) -> int:
    """What was asked for; else enough for one prompt of some length, and for several short ones."""
    if launch.kv_bytes is not None:
        return launch.kv_bytes
    per_token = kv_bytes_per_token(spec, KV_BYTES[launch.kv_type])
    tokens = max(launch.context_tokens or 0, min(KV_TOKENS, int(cap_bytes * KV_SHARE) // per_token))
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS * per_token
