"""Time of a decode step and of a prefill by roofline: bytes / bandwidth, FLOPs / measured matmul rate, kernel launches, network.

Where an engine has fused kernels for the model and device, their times are summed kernel by kernel (plan/speed/kernels.py).
The ceiling is the same model without losses and with an empty KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2

import msgspec

from windlass.core.hardware.spec import Device, Hardware
from windlass.core.layout import Layout
from windlass.core.model import MoE, Wiring
from windlass.core.place import Interval
from windlass.core.plan import Speed
from windlass.core.tiers.placement import EXCHANGE_SECONDS
from windlass.plan.engines import ACTIVATION_BYTES, CPU_ACTIVATION_BYTES, CPU_KERNEL_SECONDS, EngineProfile
from windlass.plan.memory import DeviceSlot, Fit, MemoryModel, Offloaded
from windlass.plan.shards import TpShard, busiest_share, touched_share
from windlass.plan.speed.kernel_pass import KernelPass, head_reads

RING_EFFICIENCY = 0.8
"""A ring collective reaches about 80 % of a link's one-way specification (nccl-tests on A100, H100, H200: 78 to 82 %)."""
COLLECTIVE_SECONDS = {"nvlink": 8e-6, "pcie": 20e-6, "memory": 5e-6}
"""Latency of a small all-reduce inside a node; 10 us point to point is aiconfigurator's figure, ours lies around it. Processes on
one machine that share memory exchange two or three cache lines (an assumption)."""
PEER_SECONDS = 0.5e-6
"""Added by each further peer to an all-to-all of small messages (an assumption: about one posted write each)."""


@dataclass(frozen=True)
class StepTime:
    memory: float = 0.0
    compute: float = 0.0
    kernels: float = 0.0
    network: float = 0.0
    host_link: float = 0.0
    disk: float = 0.0
    expert_fetch: float = 0.0
    """Loading offloaded experts: they are known only after routing, so nothing overlaps it."""

    @property
    def total(self) -> float:
        """Memory reads and compute overlap; launches and network do not; offloaded layers are streamed in parallel to all of it."""
        return max(max(self.memory, self.compute) + self.kernels + self.network, self.host_link, self.disk) + self.expert_fetch

    @property
    def parts(self) -> dict[str, float]:
        return {
            name: getattr(self, name) for name in ("memory", "compute", "kernels", "network", "host_link", "disk", "expert_fetch")
        }

    @property
    def bound_by(self) -> str:
        return max(self.parts.items(), key=lambda item: item[1])[0].replace("_", " ")


def _beyond(floor: StepTime, seconds: float) -> StepTime:
    """Counts the time beyond the roofline as kernel overhead."""
    return replace(floor, kernels=max(seconds - max(floor.memory, floor.compute), 0.0))


class SpeedModel:
    """Times of one fitted layout."""

    def __init__(self, model: MemoryModel, hardware: Hardware, layout: Layout, fit: Fit) -> None:
        self.model, self.hardware, self.layout, self.fit = model, hardware, layout, fit
        self.spec, self.scheme, self.engine = model.spec, model.scheme, model.engine
        self.ideal = msgspec.structs.replace(self.engine, bandwidth_efficiency=1.0, matmul_efficiency=1.0, kernel_seconds=0.0)
        self.kernel_pass = KernelPass(model, layout, fit)

    @property
    def offloads(self) -> bool:
        """Whether the engine can run it with experts in host memory."""
        return self.spec.experts is not None and all(self.kernel_pass.has(slot) for slot in self.fit.slots)

    # --- one stage, as slow as its slowest device

    def decode_stage(self, pp: int, batch: float, context: float, engine: EngineProfile) -> StepTime:
        lossless = engine is self.ideal
        times = [
            self._decode_slot(slot, moved, batch, context, engine)
            for slot, moved in zip(self.fit.slots, self.fit.offloaded, strict=True)
            if slot.pp == pp
        ]
        slowest = max(times, key=lambda time: time.total)
        network = 0.0 if lossless else self._stage_network(pp, batch)
        return StepTime(**{**slowest.parts, "network": network})

    def slot_seconds(self, batch: float, context: float) -> list[float]:
        """Time of each device for its part of a step, without communication."""
        pairs = zip(self.fit.slots, self.fit.offloaded, strict=True)
        return [self._decode_slot(slot, moved, batch, context, self.engine).total for slot, moved in pairs]

    def imbalance(self) -> float:
        """For one sequence: the slowest device over the mean. 1.0 is even."""
        seconds = self.slot_seconds(1, self.model.workload.mean_decode_context)
        return max(seconds) * len(seconds) / sum(seconds)

    def _decode_slot(self, slot: DeviceSlot, moved: Offloaded, batch: float, context: float, engine: EngineProfile) -> StepTime:
        shard, layers = self._shard(slot), self.fit.stages[slot.pp]
        here = self._weight_reads(shard, layers, moved, self._share(batch, engine))
        here += self.model.sizes.cache_bytes(layers, round(context), self.scheme, windowed=True) * shard.kv_share * batch
        flops, share = batch * self._flops(shard, layers, context), self._share(batch, engine)
        if engine is self.ideal or not self.kernel_pass.runs(slot, moved):
            return self._with_cpu(slot, moved, share, engine, self._slot_time(slot, moved, here, flops, share, 1, engine))
        floor = self._slot_time(slot, moved, here, flops, share, 1, self.ideal)
        return _beyond(floor, self.kernel_pass.seconds(slot, ceil(batch), ceil(batch), round(context)))

    def _with_cpu(self, slot: DeviceSlot, moved: Offloaded, share: float, engine: EngineProfile, time: StepTime) -> StepTime:
        """Experts in host memory beside our fused kernels: the CPU computes a part of each where it lies, while the device fetches the rest."""
        if not moved.host_experts or slot.device.kind == "cpu" or not self.kernel_pass.has(slot):
            return time
        node = self.hardware.nodes[slot.node]
        both = node.ram_bandwidth / len(node.devices) * engine.bandwidth_efficiency
        disk = node.disk_bandwidth / len(node.devices) * engine.bandwidth_efficiency
        first, last = self.fit.stages[slot.pp]
        layers = sum(isinstance(layer.feed_forward, MoE) for layer in self.spec.layers[first:last])
        exchange = 0.0 if engine is self.ideal else layers * EXCHANGE_SECONDS
        fetch = share * (moved.host_experts / both + moved.disk_experts / disk) + exchange
        return replace(time, expert_fetch=min(fetch, time.expert_fetch))

    def _share(self, batch: float, engine: EngineProfile) -> float:
        """Fraction of the local experts that a step reads; ranks that hold experts for several replicas see all their tokens."""
        tokens = batch * max(self.layout.ep / self.layout.tp, 1.0)
        return touched_share(self.spec, tokens) if engine is self.ideal else busiest_share(self.spec, tokens, self.layout.ep)

    def _slot_time(
        self, slot: DeviceSlot, moved: Offloaded, here: float, flops: float, share: float, passes: int, engine: EngineProfile
    ) -> StepTime:
        """`passes`: how often the weights are read: once per step or per prefill chunk."""
        node, layers = self.hardware.nodes[slot.node], self.fit.stages[slot.pp]
        sharing = len(node.devices)
        link = min(slot.device.host_bandwidth or node.ram_bandwidth, node.ram_bandwidth / sharing) * engine.bandwidth_efficiency
        disk = node.disk_bandwidth / sharing * engine.bandwidth_efficiency
        launch = CPU_KERNEL_SECONDS if slot.device.kind == "cpu" and engine.kernel_seconds else engine.kernel_seconds
        return StepTime(
            memory=passes * here / (slot.device.measured_bandwidth * engine.bandwidth_efficiency),
            compute=flops / (self._matmul_rate(slot.device) * engine.matmul_efficiency),
            kernels=passes * self._kernels(layers) * launch,
            host_link=passes * moved.host_always / link,
            disk=passes * moved.disk_always / disk,
            expert_fetch=passes * share * (moved.host_experts / link + moved.disk_experts / disk),
        )

    def _weight_reads(self, shard: TpShard, layers: Interval, moved: Offloaded, share: float) -> float:
        """Weight bytes of a step; offloaded weights are read from device memory too, after they are loaded."""
        always = shard.between(shard.always, layers)
        if self.model.is_last(layers):
            always += head_reads(self.spec, shard)
        return always + shard.between(shard.experts, layers) * share

    def _flops(self, shard: TpShard, layers: Interval, context: float) -> float:
        """Per token: matmuls, attention over `context` keys, and the head on the last stage."""
        scores = 2.0 * shard.between(shard.score_width, layers) * context
        head = shard.head_flops_per_token if self.model.is_last(layers) else 0.0
        return shard.between(shard.flops_per_token, layers) + scores + head

    def _shard(self, slot: DeviceSlot) -> TpShard:
        return self.model.sizes.shard(self.layout, self.scheme, slot.tp, self.fit.shares)

    def _matmul_rate(self, device: Device) -> float:
        """fp8 weights use fp8 activations if the device supports it; integer weights are dequantized to bf16 first."""
        return device.matmul_flops("fp8" if self.scheme.name == "fp8" else "bf16")

    def _kernels(self, layers: Interval) -> int:
        counted = 0
        for layer in self.spec.layers[layers[0] : layers[1]]:
            mixture = isinstance(layer.feed_forward, MoE)
            counted += self.engine.kernels_attention + (self.engine.kernels_moe if mixture else self.engine.kernels_dense)
        return counted + (3 if self.model.is_last(layers) else 1)

    # --- network

    def _stage_network(self, pp: int, tokens: float) -> float:
        layers = self.fit.stages[pp]
        element_bytes = CPU_ACTIVATION_BYTES if self.fit.slots[0].device.kind == "cpu" else ACTIVATION_BYTES
        message = tokens * self.spec.hidden_size * element_bytes
        reduces = sum(
            1 if layer.wiring in (Wiring.PARALLEL, Wiring.PARALLEL_ONE_NORM) else 2
            for layer in self.spec.layers[layers[0] : layers[1]]
        )
        seconds = reduces * self._all_reduce(pp, message) + self._expert_exchange(pp, tokens)
        if pp + 1 < self.layout.pp:
            seconds += self._hop(pp, message)
        return seconds

    def _group(self, pp: int) -> list[DeviceSlot]:
        return [slot for slot in self.fit.slots if slot.pp == pp]

    def _all_reduce(self, pp: int, num_bytes: float) -> float:
        """Ring all-reduce: 2 (n - 1) / n of the message (nccl-tests), plus a latency that grows with log n between nodes."""
        ranks = self.layout.tp
        if ranks == 1:
            return 0.0
        group = self._group(pp)
        bandwidth, latency = self._link(group, ranks)
        return latency + 2 * (ranks - 1) / ranks * num_bytes / (bandwidth * RING_EFFICIENCY)

    def _expert_exchange(self, pp: int, tokens: float) -> float:
        """Expert parallelism across replicas: two all-to-alls per layer, to dispatch tokens and to combine results."""
        experts, ranks = self.spec.experts, self.layout.ep
        if experts is None or ranks <= self.layout.tp:
            return 0.0
        layers = self.fit.stages[pp]
        mixtures = sum(isinstance(layer.feed_forward, MoE) for layer in self.spec.layers[layers[0] : layers[1]])
        sent = tokens / self.layout.tp * experts.num_active * self.spec.hidden_size * 2 * (ranks - 1) / ranks
        near = ranks <= len(self.hardware.nodes[0].devices)
        device = self._group(pp)[0].device
        bandwidth = device.link_bandwidth if near else self.hardware.network_bandwidth
        latency = COLLECTIVE_SECONDS["nvlink"] if near else 2 * self.hardware.network_latency_seconds
        return mixtures * 2 * (latency + ranks * PEER_SECONDS + sent / ((bandwidth or device.host_bandwidth) * RING_EFFICIENCY))

    def _link(self, group: list[DeviceSlot], ranks: int) -> tuple[float, float]:
        if len({slot.node for slot in group}) > 1:
            return self.hardware.network_bandwidth or 1.25e9, 2 * self.hardware.network_latency_seconds * ceil(log2(ranks))
        slowest = min(group, key=lambda slot: slot.device.link_bandwidth).device
        bandwidth = slowest.link_among(ranks) or slowest.host_bandwidth or slowest.bandwidth
        if len({slot.device.name for slot in group}) > 1:  # different cards have no NVLink between them
            bandwidth = min(bandwidth, *(slot.device.host_bandwidth or bandwidth for slot in group))
        if slowest.kind == "cpu":
            return bandwidth, COLLECTIVE_SECONDS["memory"]
        return bandwidth, COLLECTIVE_SECONDS["nvlink" if bandwidth > 100e9 else "pcie"]

    def _hop(self, pp: int, num_bytes: float) -> float:
        here, there = self._group(pp)[0], self._group(pp + 1)[0]
        if here.node != there.node:
            return self.hardware.network_latency_seconds + num_bytes / (self.hardware.network_bandwidth or 1.25e9)
        return 10e-6 + num_bytes / (here.device.link_bandwidth or here.device.host_bandwidth or 1e9)

    # --- whole steps

    def decode(self, batch: int, context: float, engine: EngineProfile) -> tuple[float, float, StepTime]:
        """(tokens per second of a replica, seconds per token, time of the slowest stage).

        Sequences go through the stages as one batch, or as pp micro-batches that keep every stage busy, whichever is faster.
        """
        whole = [self.decode_stage(pp, batch, context, engine) for pp in range(self.layout.pp)]
        seconds = sum(time.total for time in whole)
        rate = batch / seconds
        worst = max(whole, key=lambda time: time.total)
        if self.layout.pp > 1 and batch >= self.layout.pp:
            group = batch / self.layout.pp
            parts = [self.decode_stage(pp, group, context, engine) for pp in range(self.layout.pp)]
            slowest = max(parts, key=lambda time: time.total)
            if group / slowest.total > rate:
                return group / slowest.total, slowest.total * self.layout.pp, slowest
        return rate, seconds, worst

    def prefill(self, prompt: int, prompts: int, engine: EngineProfile) -> tuple[float, float]:
        """(seconds to prefill `prompts` of this length in one batch; seconds of the slowest stage)."""
        stages = [self._prefill_stage(pp, prompt, prompts, engine) for pp in range(self.layout.pp)]
        return sum(stages), max(stages)

    def _prefill_stage(self, pp: int, prompt: int, prompts: int, engine: EngineProfile) -> float:
        tokens = prompt * prompts
        chunks = ceil(tokens / engine.step_tokens)
        times = [
            self._prefill_slot(slot, moved, prompt, prompts, chunks, engine)
            for slot, moved in zip(self.fit.slots, self.fit.offloaded, strict=True)
            if slot.pp == pp
        ]
        return max(time.total for time in times) + self._stage_network(pp, tokens)

    def _prefill_slot(
        self, slot: DeviceSlot, moved: Offloaded, prompt: int, prompts: int, chunks: int, engine: EngineProfile
    ) -> StepTime:
        shard, layers = self._shard(slot), self.fit.stages[slot.pp]
        tokens = prompt * prompts
        share = self._share(tokens / chunks, engine)
        # Only the last token of a prompt needs the head.
        head = shard.head_flops_per_token * (tokens - prompts) if self.model.is_last(layers) else 0.0
        flops = tokens * self._flops(shard, layers, prompt / 2) - head
        reads = self._weight_reads(shard, layers, moved, share)
        if engine is self.ideal or not self.kernel_pass.runs(slot, moved):
            return self._slot_time(slot, moved, reads, flops, share, chunks, engine)
        floor = self._slot_time(slot, moved, reads, flops, share, chunks, self.ideal)
        return _beyond(floor, chunks * self.kernel_pass.seconds(slot, ceil(tokens / chunks), ceil(prompts / chunks), prompt // 2))

    def speed(self) -> Speed:
        work = self.model.workload
        batch = self.model.sequences(self.layout)
        rate, seconds, worst = self.decode(batch, work.mean_decode_context, self.engine)
        ceiling, _, _ = self.decode(batch, 0, self.ideal)
        prompt_seconds, _ = self.prefill(work.prompt_tokens, 1, self.engine)
        prompts = max(1, min(batch, self.engine.step_tokens // work.prompt_tokens))  # short prompts share a step
        together, slowest_stage = self.prefill(work.prompt_tokens, prompts, self.engine)
        through = (slowest_stage if batch >= self.layout.pp > 1 else together) / prompts
        experts = self.spec.experts
        prompt_rate = work.prompt_tokens / through
        busy = min(self.layout.dp, work.concurrency)  # one sequence keeps only one replica busy
        return Speed(
            decode_tokens_per_second=round(rate * busy, 3),
            decode_ceiling_tokens_per_second=round(ceiling * busy, 3),
            prefill_tokens_per_second=round(prompt_rate * busy, 1),
            sustained_tokens_per_second=round(busy / (1 / rate + work.prompt_tokens / work.new_tokens / prompt_rate), 3),
            time_to_first_token_seconds=round(prompt_seconds + seconds, 6),
            bound_by=worst.bound_by,
            step_seconds=seconds,
            concurrency=work.concurrency,
            decode_bytes_per_step=round(self._step_bytes(batch)),
            distinct_experts=round(touched_share(self.spec, batch) * experts.num_experts, 1) if experts else 0.0,
            breakdown={name: value for name, value in worst.parts.items() if value},
        )

    def _step_bytes(self, batch: int) -> float:
        """Weights and KV cache that one replica reads per step, over all its devices."""
        total, context = 0.0, round(self.model.workload.mean_decode_context)
        share = touched_share(self.spec, batch)
        for slot, moved in zip(self.fit.slots, self.fit.offloaded, strict=True):
            shard, layers = self._shard(slot), self.fit.stages[slot.pp]
            total += self._weight_reads(shard, layers, moved, share)
            total += self.model.sizes.cache_bytes(layers, context, self.scheme, windowed=True) * shard.kv_share * batch
        return total
