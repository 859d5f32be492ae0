"""Builds a decoder with its weights in their tiers. Nothing changes for a model that fits into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple, cast

import msgspec

from windlass.core.launch import Launch
from windlass.core.model import ModelSpec
from windlass.core.scheme import kv_token_bytes
from windlass.core.tiers.below import planned_with_disk, with_disk
from windlass.core.tiers.budget import LOADING_BYTES, activation_bytes, gpu_reserve_bytes
from windlass.core.tiers.demand import HeldTensor
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
from windlass.core.tiers.stats import TierStats
from windlass.core.tiers.values import Demand, TierPlacement
from windlass.errors import BadInput
from windlass.model.formats.disk.atomic import require_free
from windlass.runtime.engine.memory import CPU, LEAST_TOKENS, cache_bytes, capped_cache_bytes, check_weights
from windlass.runtime.engine.speculate.setup import wants_mtp
from windlass.runtime.kernels.cuda.route import MAX_ROWS
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.nn.guess import next_experts
from windlass.runtime.nn.layer import DecoderLayer
from windlass.runtime.nn.moe import MixtureOfExperts
from windlass.runtime.nn.parallel.shard import ModelShard, kv_share
from windlass.runtime.offload.device.dense import DenseTieredWeights
from windlass.runtime.offload.device.disk import DiskPlace, written_experts
from windlass.runtime.offload.device.weights import DeviceTieredWeights
from windlass.runtime.offload.experts.experts import DiskExperts
from windlass.runtime.offload.placement import (
    HostBudget,
    TierFolder,
    check_space,
    describe_tiers,
    host_budget,
    measured_speeds,
    place_rank,
    planned_rank,
    rank_demand,
    room_below,
    tier_folder,
)
from windlass.runtime.offload.tiers.speed import check_speed, disk_speed
from windlass.runtime.offload.weights import ExpertSource, TieredWeights, tier_key
from windlass.runtime.parallel.groups import smallest
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
    """Offloads what does not fit the rank's memory. Raises DoesNotFit before anything large is read."""
    if device == "cpu" and launch.gpu_memory:
        raise BadInput("--gpu-memory has no effect on a CPU; leave it out, or see --host-memory")
    if device != "cpu" and not device.startswith("cuda") and launch.disk_folder is not None:
        raise BadInput(f"--disk-folder: weights are kept on disk beside CPUs and NVIDIA GPUs, not beside {device}; leave it out")

    if device != "cpu" and launch.disk_folder is not None and not _keeps_experts_on_disk(weights):
        raise BadInput(
            "--disk-folder: beside a GPU only experts of int4 mixtures are kept on disk, on Hopper GPUs; leave it out, or use --device cpu"
        )

    def decoder(source: Any) -> Decoder:
        mtp = wants_mtp(launch, weights.spec, weights.shard) and source is weights.source
        if launch.speculate == "mtp" and not mtp:
            raise BadInput("--speculate mtp needs all weights in memory, and some are on disk; choose ngram or a small model")
        begin = getattr(source, "begin", None)
        # Nothing reads the numbers of weights while a decoder is built of all of them.
        if source is weights.source and begin is not None:
            begin()
        return Decoder(weights.spec, source, context_tokens, shard=weights.shard, mtp=mtp)

    cap_bytes = _capped(launch, device, weights.rank, free_bytes)
    if device.startswith("cuda"):
        return _on_device(launch, device, weights, cap_bytes, decoder)
    if device == "cpu" and not smallest(weights.shard.groups, [int(not _exceeds(launch, weights, free_bytes))])[0]:
        return _beside_disk(launch, weights, decoder)
    check_weights(weights.spec.name, weights.num_bytes, cap_bytes)
    return BuiltDecoder(decoder(weights.source), None, "")


def _keeps_experts_on_disk(weights: RankWeights) -> bool:
    return getattr(weights.source, "tiled", False) and weights.spec.experts is not None


def _beside_disk(launch: Launch, weights: RankWeights, decoder: Callable[[Any], Decoder]) -> BuiltDecoder:
    """On a CPU: what does not fit host memory is read from disk while the model runs."""
    spec, shard, demand = weights.spec, weights.shard, rank_demand(list(weights.tensors()), weights.spec, launch)
    kv_bytes = smallest(shard.groups, [_kv_bytes(launch, spec)])[0]
    activations = activation_bytes(spec, launch.max_sequences or CPU.max_sequences, launch.max_step_tokens)
    share = kv_share(shard, spec)
    budget = host_budget(launch, int(kv_bytes * share) + activations)
    fits = not launch.tiers and demand.total_bytes <= budget.weight_bytes
    placed, folder = (None, None) if fits else _placed(launch, weights, demand, budget)
    # The cache grows to its usual size where the weights of all ranks leave room for it.
    left = int((budget.weight_bytes - demand.total_bytes) / max(share, 1e-9)) if placed is None else 0
    kv_bytes += smallest(shard.groups, [_more_kv(launch, spec, kv_bytes, left)])[0]
    if placed is None or folder is None:
        return BuiltDecoder(decoder(weights.source), kv_bytes, "")
    tiered = TieredWeights(weights.source, placed, folder.path, folder.key, keep=folder.keep, spare_bytes=LOADING_BYTES // 2)
    built = _built(tiered, decoder)
    return BuiltDecoder(built, kv_bytes, f"{describe_tiers(placed)} in {folder.path}")


def _on_device(
    launch: Launch, device: str, weights: RankWeights, cap_bytes: int, decoder: Callable[[Any], Decoder]
) -> BuiltDecoder:
    """Where the weights of any rank exceed its device, all ranks take the limits that leave room for offloading."""
    is_tiled, needs = getattr(weights.source, "tiled", False), device_needs(launch)
    stage = ModelStage(weights.spec, weights.shard.layers(weights.spec))
    asks = "--lora" if launch.adapters else "--speculate" if launch.speculate not in ("off", "auto") else ""
    can_move = is_tiled and not asks and (launch.max_sequences or 0) <= MAX_ROWS
    limits = device_limits(stage, cap_bytes, needs) if is_tiled else DeviceLimits(0, 0)
    beside = _least_beside(launch, stage) if can_move else 0
    host = host_budget(launch, 0)  # before any rank of this machine has loaded something: they meet in the next line
    # 0 where this rank has to move weights: the smallest of all.
    fits, *agreed = smallest(weights.shard.groups, [int(weights.num_bytes + beside <= cap_bytes), *limits], device)
    if fits:
        return BuiltDecoder(decoder(weights.source), None, "")
    if is_tiled or weights.num_bytes > cap_bytes:
        _refuse_beside(launch, asks, weights, cap_bytes)
    if not is_tiled:
        check_weights(weights.spec.name, weights.num_bytes, cap_bytes)  # else another rank has too little, and says so
        return BuiltDecoder(decoder(weights.source), None, "")
    return _beside_device(launch, weights, cap_bytes, host, stage, DeviceLimits(*agreed), decoder)


def _beside_device(
    launch: Launch,
    weights: RankWeights,
    cap_bytes: int,
    host: HostBudget,
    stage: ModelStage,
    limits: DeviceLimits,
    decoder: Callable[[Any], Decoder],
) -> BuiltDecoder:
    """Experts, or parts of feed-forwards, that do not fit the device go to host memory, and experts for which there is no room there to disk."""
    kv_bytes = launch.kv_bytes or limits.kv_tokens * kv_token_bytes(weights.spec, launch.kv_type)
    if needed_bytes(stage, weights.num_bytes, limits, launch.kv_type) <= cap_bytes:  # of this rank all fit
        return BuiltDecoder(decoder(weights.source), kv_bytes, "", MAX_ROWS, limits.step_tokens)
    planned = launch.tiers[min(weights.rank, len(launch.tiers) - 1)] if launch.tiers else None
    most = planned.device_slots if planned is not None and planned.num_experts else None
    demand = rank_demand(list(weights.tensors()), weights.spec, launch)
    plan, disk = placed_below(launch, weights, plan_device(stage, demand, cap_bytes, limits, launch.kv_type, most), host, planned)
    source: DenseTieredWeights | DeviceTieredWeights
    source = (
        DenseTieredWeights(weights.source, plan.split)
        if stage.part.experts is None
        else DeviceTieredWeights(weights.source, plan.split, plan.first_layer, disk)
    )
    built = _built(source, decoder)
    if source.speeds is not None:
        speeds = msgspec.structs.replace(
            source.speeds, disk=built.tier.burst_speed(plan.misses.burst) if disk is not None else 0.0
        )
        built.tier.speeds, built.tier.placed = speeds, plan.placed(speeds)
    return BuiltDecoder(built, kv_bytes, built.tier.line, MAX_ROWS, limits.step_tokens)


def placed_below(
    launch: Launch, weights: RankWeights, plan: DevicePlan, host: HostBudget, planned: TierPlacement | None
) -> tuple[DevicePlan, DiskPlace | None]:
    """With experts on disk where host memory is too small. Raises before anything long begins where the disk is too small or too slow."""
    host = host._replace(reserved_bytes=host.reserved_bytes + gpu_reserve_bytes(host.used_bytes))
    is_planned = planned is not None and planned.disk_experts > 0
    if not is_planned and plan.host_bytes <= host.weight_bytes:
        return plan, None
    if weights.spec.experts is None:
        return with_disk(plan, room_below(host, None)), None
    folder = tier_folder(launch, _key(weights, layout="tiles"))
    room = room_below(host, folder, written_experts(folder.path, folder.key) if folder.keep else 0, launch.ranks_per_machine)
    made = planned_with_disk(plan, planned, room) if planned is not None and is_planned else with_disk(plan, room)
    require_free(folder.path, made.disk_bytes - folder.written_bytes)
    speed = disk_speed(folder.path)
    check_speed(folder.path, speed, made.step_disk_bytes)
    return made, DiskPlace(folder.path, folder.key, folder.keep, speed)


def _built(source: TieredWeights | DenseTieredWeights | DeviceTieredWeights, decoder: Callable[[Any], Decoder]) -> Decoder:
    try:
        built = decoder(source)
        built.tier = source.finish()
        _foresee(built)
    except BaseException:
        source.abort()
        raise
    return built


def _foresee(decoder: Decoder) -> None:
    """Layers with experts on disk learn which experts the next of them will probably need."""
    layers = [
        layer for layer in cast("list[DecoderLayer]", list(decoder.layers)) if isinstance(layer.feed_forward, MixtureOfExperts)
    ]
    for layer, following in pairwise(layers):
        here: Any = layer.feed_forward.gate_up
        there: Any = following.feed_forward.gate_up
        if not isinstance(here, DiskExperts) or not isinstance(there, DiskExperts):
            continue
        guess = next_experts(layer, following)
        if guess is not None:
            here.foresee(there, guess)


def _refuse_beside(launch: Launch, asks: str, weights: RankWeights, cap_bytes: int) -> None:
    if asks:
        raise BadInput(
            f"{asks} needs all weights on the GPU, and they need {format_bytes(weights.num_bytes)} of {format_bytes(cap_bytes)}; leave it out, "
            "or use fewer bits"
        )
    if (launch.max_sequences or 0) > MAX_ROWS:
        raise BadInput(
            f"{launch.max_sequences} sequences at once need all weights on the GPU; ask for at most {MAX_ROWS}, or use fewer bits"
        )


def device_needs(launch: Launch) -> DeviceNeeds:
    return DeviceNeeds(launch.kv_type, launch.kv_bytes, launch.context_tokens, launch.max_step_tokens)


def _least_beside(launch: Launch, stage: ModelStage) -> int:
    """The KV cache that is needed, and what a device holds besides."""
    per_token, whole = (kv_token_bytes(spec, launch.kv_type) for spec in (stage.part, stage.spec))
    tokens = launch.context_tokens or LEAST_TOKENS
    return (tokens * per_token if launch.kv_bytes is None else launch.kv_bytes * per_token // whole) + OTHER_BYTES


def tier_stats(decoder: Any) -> TierStats | None:
    tier = getattr(decoder, "tier", None)
    return None if tier is None else tier.stats()


def _exceeds(launch: Launch, weights: RankWeights, free_bytes: int) -> bool:
    """Without a cap, memory is what is free, and the KV cache takes what weights leave."""
    free = free_bytes // launch.ranks_per_machine
    return bool(launch.tiers) or launch.host_memory is not None or weights.num_bytes > free


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
        else place_rank(demand, budget, folder, measured_speeds(folder.path), launch.ranks_per_machine)
    )
    check_space(folder, placed)
    return placed, folder


def _key(weights: RankWeights, **more: str) -> str:
    shard = weights.shard
    where = {"placement": msgspec.to_builtins(shard.placement), "tp": shard.tp_index, "layers": shard.layers(weights.spec)}
    return tier_key(**weights.identity, **where, **more)
