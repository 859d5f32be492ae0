"""Builds a decoder with its weights in their tiers. Nothing changes for a model that fits into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from windlass.core.launch import Launch
from windlass.core.model import ModelSpec, kv_bytes_per_token
from windlass.core.scheme import KV_BYTES
from windlass.core.tiers.budget import LOADING_BYTES, activation_bytes
from windlass.core.tiers.demand import HeldTensor
from windlass.core.tiers.stats import TierStats
from windlass.core.tiers.values import Demand, TierPlacement
from windlass.engine.memory import CPU, LEAST_TOKENS, cache_bytes, capped_cache_bytes, check_weights
from windlass.engine.speculate.setup import wants_mtp
from windlass.errors import BadInput
from windlass.kernels.cuda.route import MAX_ROWS
from windlass.nn.decoder import Decoder
from windlass.nn.parallel.shard import ModelShard
from windlass.offload.device.dense import DenseTieredWeights
from windlass.offload.device.plan import OTHER_BYTES, check_host, plan_dense, plan_device
from windlass.offload.device.weights import DeviceTieredWeights
from windlass.offload.placement import (
    HostBudget,
    TierFolder,
    check_space,
    describe_tiers,
    host_budget,
    measured_speeds,
    place_rank,
    planned_rank,
    rank_demand,
    tier_folder,
)
from windlass.offload.weights import ExpertSource, TieredWeights, tier_key
from windlass.units import format_bytes


class RankWeights(NamedTuple):
    """What one rank is built from."""

    spec: ModelSpec
    shard: ModelShard
    source: ExpertSource
    num_bytes: int
    """In memory, if all of it is there."""
    tensors: Callable[[], Iterable[HeldTensor]]
    identity: dict[str, Any]
    """Of the weights: names the file on disk."""

    @property
    def rank(self) -> int:
        groups = self.shard.groups
        return groups.pp.rank * groups.tp.size + groups.tp.rank


class BuiltDecoder(NamedTuple):
    decoder: Decoder
    kv_bytes: int | None
    """Of the whole model's cache, as the placement counted it; None: nothing is offloaded."""
    line: str
    """What went where, for the user; empty: all is in memory."""
    max_sequences: int | None = None
    """At once, where that is limited by what was offloaded."""
    step_tokens: int | None = None
    """Of the largest step: so many that copying the weights takes no longer than computing."""


def build_decoder(launch: Launch, device: str, weights: RankWeights, free_bytes: int, context_tokens: int | None) -> BuiltDecoder:
    """Offloads to disk what does not fit into host memory. Raises DoesNotFit before anything large is read."""
    if device == "cpu" and launch.gpu_memory:
        raise BadInput("--gpu-memory has no effect on a CPU; leave it out, or see --host-memory")
    if device != "cpu" and launch.disk_folder is not None:
        raise BadInput("--disk-folder has no effect on a GPU yet; leave it out, or add --device cpu")

    def decoder(source: Any) -> Decoder:
        mtp = wants_mtp(launch, weights.spec, weights.shard) and source is weights.source
        if launch.speculate == "mtp" and not mtp:
            raise BadInput("--speculate mtp needs all weights in memory, and some are on disk; choose ngram or a small model")
        return Decoder(weights.spec, source, context_tokens, shard=weights.shard, mtp=mtp)

    if device.startswith("cuda") and _exceeds_device(launch, device, weights, free_bytes):
        return _beside_device(launch, device, weights, free_bytes, decoder)
    if device != "cpu" or not _exceeds(launch, weights, free_bytes):
        check_weights(weights.spec.name, weights.num_bytes, _capped(launch, device, weights.rank, free_bytes))
        return BuiltDecoder(decoder(weights.source), None, "")
    kv_bytes = _kv_bytes(launch, weights.spec)
    activations = activation_bytes(weights.spec, launch.max_sequences or CPU.max_sequences, launch.max_step_tokens)
    budget = host_budget(launch, kv_bytes // launch.layout.world + activations)
    demand = rank_demand(list(weights.tensors()), weights.spec, launch)
    if not launch.tiers and demand.total_bytes <= budget.weight_bytes:
        left = (budget.weight_bytes - demand.total_bytes) * launch.layout.world
        return BuiltDecoder(decoder(weights.source), kv_bytes + _more_kv(launch, weights.spec, kv_bytes, left), "")
    placed, folder = _placed(launch, weights, demand, budget)
    tiered = TieredWeights(weights.source, placed, folder.path, folder.key, keep=folder.keep, spare_bytes=LOADING_BYTES // 2)
    try:
        built = decoder(tiered)
        built.tier = tiered.finish()
    except BaseException:
        tiered.abort()
        raise
    return BuiltDecoder(built, kv_bytes, f"{describe_tiers(placed)} in {folder.path}")


def _exceeds_device(launch: Launch, device: str, weights: RankWeights, free_bytes: int) -> bool:
    """Weights alone; where some can be moved and nothing needs them all on the device, weights beside the KV cache that is needed."""
    cap = _capped(launch, device, weights.rank, free_bytes)
    needs_all = launch.adapters or launch.speculate not in ("off", "auto") or (launch.max_sequences or 0) > MAX_ROWS
    if needs_all or not getattr(weights.source, "tiled", False):
        return weights.num_bytes > cap
    tokens = launch.context_tokens or LEAST_TOKENS
    kv_bytes = launch.kv_bytes or tokens * kv_bytes_per_token(weights.spec, KV_BYTES[launch.kv_type])
    return weights.num_bytes + kv_bytes + OTHER_BYTES > cap


def _beside_device(
    launch: Launch, device: str, weights: RankWeights, free_bytes: int, decoder: Callable[[Any], Decoder]
) -> BuiltDecoder:
    """Experts, or parts of feed-forwards, that do not fit the device go to host memory."""
    cap = _capped(launch, device, weights.rank, free_bytes)
    if launch.speculate not in ("off", "auto") or launch.adapters:
        raise BadInput(
            f"{'--lora' if launch.adapters else '--speculate'} needs all weights on the GPU, and they need {format_bytes(weights.num_bytes)} of "
            f"{format_bytes(cap)}; leave it out, or use fewer bits"
        )
    if (launch.max_sequences or 0) > MAX_ROWS:
        raise BadInput(
            f"{launch.max_sequences} sequences at once need all weights on the GPU; ask for at most {MAX_ROWS}, or use fewer bits"
        )
    if not getattr(weights.source, "tiled", False):
        check_weights(weights.spec.name, weights.num_bytes, cap)
    demand = rank_demand(list(weights.tensors()), weights.spec, launch)
    is_dense = weights.spec.experts is None
    plan = (plan_dense if is_dense else plan_device)(weights.spec, demand, cap, launch)
    check_host(launch, plan.host_bytes)
    source: DenseTieredWeights | DeviceTieredWeights
    source = (
        DenseTieredWeights(weights.source, plan.split)
        if is_dense
        else DeviceTieredWeights(weights.source, plan.split, plan.first_layer)
    )
    try:
        built = decoder(source)
        built.tier = source.finish()
    except BaseException:
        source.abort()
        raise
    if source.speeds is not None:
        built.tier.speeds, built.tier.placed = source.speeds, plan.placed(source.speeds)
    return BuiltDecoder(built, plan.kv_bytes, built.tier.line, MAX_ROWS, plan.step_tokens)


def tier_stats(decoder: Any) -> TierStats | None:
    tier = getattr(decoder, "tier", None)
    return None if tier is None else tier.stats()


def _exceeds(launch: Launch, weights: RankWeights, free_bytes: int) -> bool:
    """Without a cap, memory is what is free, and the KV cache takes what weights leave."""
    return bool(launch.tiers) or launch.host_memory is not None or weights.num_bytes > free_bytes


def _capped(launch: Launch, device: str, rank: int, free_bytes: int) -> int:
    """Devices take the caps in turn; the last one counts for all that follow."""
    if device == "cpu" or not launch.gpu_memory:
        return free_bytes
    return min(free_bytes, launch.gpu_memory[min(rank, len(launch.gpu_memory) - 1)])


def _kv_bytes(launch: Launch, spec: ModelSpec) -> int:
    cap = host_budget(launch, 0).weight_bytes * launch.ranks_per_machine
    sequences = launch.max_sequences or CPU.max_sequences
    return capped_cache_bytes(spec, launch.kv_type, launch.context_tokens, sequences, launch.kv_bytes, cap)


def _more_kv(launch: Launch, spec: ModelSpec, kv_bytes: int, left_bytes: int) -> int:
    """Where all weights fit under the cap, the cache may grow to its usual size."""
    sequences = launch.max_sequences or CPU.max_sequences
    usual = launch.kv_bytes or cache_bytes(spec, launch.kv_type, launch.context_tokens, sequences, 2**62, CPU)
    return max(min(usual - kv_bytes, left_bytes), 0)


def _placed(launch: Launch, weights: RankWeights, demand: Demand, budget: HostBudget) -> tuple[TierPlacement, TierFolder]:
    folder = tier_folder(launch, _key(weights))
    placed = (
        planned_rank(launch.tiers, weights.rank, demand, budget)
        if launch.tiers
        else place_rank(demand, budget, folder, measured_speeds(folder.path))
    )
    check_space(folder, placed)
    return placed, folder


def _key(weights: RankWeights) -> str:
    shard = weights.shard
    where = {"placement": msgspec.to_builtins(shard.placement), "tp": shard.tp_index, "layers": shard.layers(weights.spec)}
    return tier_key(**weights.identity, **where)
