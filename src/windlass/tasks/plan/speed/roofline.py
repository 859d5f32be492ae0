"""Time of a decode step and of a prefill by roofline: bytes / bandwidth, FLOPs / measured matmul rate, kernel launches, network.

What an engine reaches of each is in its file (tasks/plan/engines). Where an engine has fused kernels for the model and device, their times are
summed kernel by kernel (tasks/plan/speed/kernels.py). The ceiling is the same model without losses and with an empty KV cache.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from windlass.core.fused import num_blocks
from windlass.core.hardware.cpu import MATMUL_FRACTION, PEAK_FLOPS_PER_CORE, num_cores
from windlass.core.hardware.spec import Device, Hardware, Node
from windlass.core.layout import Layout
from windlass.core.model import LatentAttention
from windlass.core.place import Interval
from windlass.core.scheme import GGUF_NAMES
from windlass.core.tiers.exchange import EXCHANGE_SECONDS, FETCHED, HostReads, waiting_seconds
from windlass.core.tiers.misses import IN_BURSTS, Misses
from windlass.core.tiers.steps import offload_step_tokens
from windlass.tasks.plan.engines.load import rates_on
from windlass.tasks.plan.engines.profile import CPU_STEP_TOKENS, IDEAL, Rates
from windlass.tasks.plan.memory import DeviceSlot, Fit, MemoryModel, Offloaded
from windlass.tasks.plan.shards import TpShard, busiest_share, touched_share
from windlass.tasks.plan.speed.kernel_pass import KernelPass, head_reads
from windlass.tasks.plan.speed.network import Network
from windlass.tasks.plan.speed.step import StepTime, at_once, beyond
from windlass.tasks.plan.speed.work import Work, launch_seconds

HOST_BYTES_PER_CORE, MOST_HOST_CORES = 10e9, 32
"""Cores of a host of which only the memory's speed is known: about 10 GB/s of reads each (EPYC 7002 to 9005, Xeon 4 to 6: 5 to 19), and no
more than 32: faster memory is mostly more channels or a second socket."""
DRAFT_LAYERS = 1.5
"""A draft of the MTP layer costs as much as so many layers: its own and its head."""

INTEGER_PEAK = 8.0
"""For ceilings: 8-bit dot products of a CPU at best, over the fp32 products that it is rated by (four to a lane, and all of the peak instead of 0.6,
at desktop clocks)."""

HOST_ISA = {"avx2": 0.7, "neon": 0.4}
"""Products of a host over one with AVX-512. AMX is used for few types; what engines gain from it is in their figures."""

HOST_PRODUCT_BYTES = 900e9
"""Of 4-bit weights that our CPU kernels multiply with one row in a second: 14 GB/s with 64 rows, on 16 cores with AVX-512
(docs/reference/cuda-notes.md, 28)."""


class SpeedModel:
    """Times of one fitted layout."""

    def __init__(self, model: MemoryModel, hardware: Hardware, layout: Layout, fit: Fit) -> None:
        self.model, self.hardware, self.layout, self.fit = model, hardware, layout, fit
        self.spec, self.scheme, self.engine = model.spec, model.scheme, model.engine
        self.kernel_pass = KernelPass(model, layout, fit)
        self.network = Network(self.spec, self.engine, hardware, layout, fit, self.scheme.bits)
        self.latent = any(isinstance(layer.mixer, LatentAttention) for layer in self.spec.layers)
        self.rest = self.engine.rest_bits.get(self.scheme.name, 16.0) / 16.0
        """Of the bytes of matrices that are not experts: some engines' files quantize those too."""
        self._launches: dict[tuple[Interval, str], float] = {}

    @property
    def offloads(self) -> bool:
        """Whether the engine can run it with weights in host memory."""
        own = all(self.kernel_pass.has(slot) for slot in self.fit.slots)
        return own or self.engine.cpu_layers

    # --- one stage, as slow as its slowest device

    def decode_stage(self, pp: int, batch: float, context: float, *, lossless: bool = False) -> StepTime:
        times = [
            self._decode_slot(slot, moved, batch, context, lossless)
            for slot, moved in zip(self.fit.slots, self.fit.offloaded, strict=True)
            if slot.pp == pp
        ]
        slowest = max(times, key=lambda time: time.total)
        return slowest if lossless else self._communicating(slowest, pp, batch * self.rows)

    def _communicating(self, time: StepTime, pp: int, tokens: float) -> StepTime:
        """The exchange of experts may hide behind the computation of the other half of the batch."""
        rates = rates_on(self.engine, self.fit.slots[0].device)
        exchange = self.network.exchange(pp, tokens)
        hidden = min(exchange * rates.overlap, time.memory + time.compute)
        return replace(time, network=self.network.stage(pp, tokens), exchange=exchange - hidden)

    def slot_seconds(self, batch: float, context: float) -> list[float]:
        """Time of each device for its part of a step, without communication."""
        pairs = zip(self.fit.slots, self.fit.offloaded, strict=True)
        return [self._decode_slot(slot, moved, batch, context, False).total for slot, moved in pairs]

    def imbalance(self) -> float:
        """For one sequence: the slowest device over the mean. 1.0 is even."""
        seconds = self.slot_seconds(1, self.model.workload.mean_decode_context)
        return max(seconds) * len(seconds) / sum(seconds)

    @property
    def rows(self) -> int:
        """Rows of a sequence in a decode step: one, and its drafts."""
        return 1 + self.model.workload.draft_tokens

    def _decode_slot(self, slot: DeviceSlot, moved: Offloaded, batch: float, context: float, lossless: bool) -> StepTime:
        shard, layers, rows = self._shard(slot), self.fit.stages[slot.pp], batch * self.rows
        cache = self.model.sizes.cache_bytes(layers, round(context), self.scheme, windowed=True) * shard.kv_share * batch
        work = self._work(shard, layers, moved, rows, 1, lossless, cache=cache, context=context)
        if lossless:
            return at_once(self._offloaded(slot, moved, rows, self._slot_time(slot, work, IDEAL), IDEAL))
        rates = self._rates(slot)
        if not self.kernel_pass.runs(slot, moved):
            time = self._slot_time(slot, work, rates)
            time = replace(
                time, kernels=self._launch(layers, slot.device, rates) * self._drafting, front_end=self._front_end(rates, batch)
            )
            return self._offloaded(slot, moved, rows, time, rates)
        floor = self._slot_time(slot, work, IDEAL)
        return beyond(floor, self.kernel_pass.seconds(slot, ceil(rows), ceil(rows), round(context)))

    @property
    def _drafting(self) -> float:
        return 1 + self.model.workload.draft_tokens * DRAFT_LAYERS / self.spec.num_layers

    def _front_end(self, rates: Rates, batch: float) -> float:
        return rates.step_seconds + batch * rates.sequence_seconds

    def _work(
        self,
        shard: TpShard,
        layers: Interval,
        moved: Offloaded,
        rows: float,
        passes: int,
        lossless: bool,
        *,
        cache: float,
        context: float,
        head_rows: float | None = None,
    ) -> Work:
        """`rows` tokens in `passes` steps, each attending to `context` keys."""
        share = self._share(rows / passes, lossless)
        experts = shard.between(shard.experts, layers)
        if self.engine.cpu_layers:  # what lies in host memory is computed there
            experts -= moved.host_experts
        head = shard.head_flops_per_token * (rows if head_rows is None else head_rows) if self.model.is_last(layers) else 0.0
        expert_flops = rows * shard.between(shard.expert_flops, layers) * (1 - self._away(shard, layers, moved))
        dense = rows * (shard.between(shard.flops_per_token, layers) - shard.between(shard.expert_flops, layers))
        return Work(
            dense_bytes=self._always(shard, layers, moved),
            expert_bytes=experts * share,
            cache_bytes=cache,
            dense_flops=dense + head,
            expert_flops=expert_flops,
            score_flops=rows * self.model.sizes.score_flops(layers, context) / self.layout.tp,
            rows_per_expert=self._rows_per_expert(rows / passes),
            one_expert=self._one_expert(shard, layers),
            latent=self.latent,
            packed=self.scheme.bits < 8 and not self.scheme.only_experts,
            width=self.spec.hidden_size,
            passes=passes,
        )

    def _away(self, shard: TpShard, layers: Interval, moved: Offloaded) -> float:
        """Fraction of the experts that the CPU computes."""
        experts = shard.between(shard.experts, layers)
        return moved.host_experts / experts if self.engine.cpu_layers and experts else 0.0

    def _one_expert(self, shard: TpShard, layers: Interval) -> float:
        experts, routed = self.spec.experts, self.model.sizes.routed_layers(layers)
        if experts is None or not routed:
            return 0.0
        return shard.between(shard.experts, layers) / routed / max(experts.num_experts / self.layout.ep, 1.0)

    def _rows_per_expert(self, rows: float) -> float:
        experts = self.spec.experts
        if experts is None:
            return rows
        tokens = rows * max(self.layout.ep / self.layout.tp, 1.0)
        return max(tokens * experts.num_active / experts.num_experts, 1.0)

    def _offloaded(self, slot: DeviceSlot, moved: Offloaded, rows: float, time: StepTime, rates: Rates) -> StepTime:
        """A decode step with weights in host memory: computed by the CPU, or fetched over the link, or both."""
        if not (moved.host or moved.disk) or slot.device.kind == "cpu":
            return self._streamed(slot, moved, self._share(rows, rates is IDEAL), 1, time, rates)
        share = self._share(rows, rates is IDEAL)
        if self.engine.cpu_layers:
            return self._with_cpu(slot, moved, share, time, rates)
        return self._with_both(slot, moved, share, rows, self._streamed(slot, moved, share, 1, time, rates), rates)

    def _with_cpu(self, slot: DeviceSlot, moved: Offloaded, share: float, time: StepTime, rates: Rates) -> StepTime:
        """The CPU computes what lies in host memory: all of a layer's experts, or whole layers of a dense model."""
        node, shard, layers = self.hardware.nodes[slot.node], self._shard(slot), self.fit.stages[slot.pp]
        ram = node.ram_bandwidth / self._sharing(node) * rates.host_read
        held = share * moved.host_experts + moved.host_always
        packed = 1 / ram + self._host_unpacking(node, rates)
        switches = self.model.sizes.routed_layers(layers) * self._away(shard, layers, moved)
        dense = shard.between(shard.always, layers)
        switches += (layers[1] - layers[0]) * moved.host_always / dense if dense else 0.0
        disk = (share * moved.disk_experts + moved.disk_always) / (node.disk_bandwidth / self._sharing(node))
        return replace(time, host_compute=held * packed + switches * rates.host_layer_seconds, expert_fetch=disk)

    def _host_unpacking(self, node: Node, rates: Rates) -> float:
        """Seconds a byte, beside those of reading it: by the host's cores where they are known. Few bits take as long as four."""
        if not rates.host_compute:
            return 0.0
        found = 1 / (rates.host_compute * min(self.scheme.bits / 4, 1.0))
        each = rates.core_weights * (rates.grid_weights if self.scheme.is_grid else 1.0) * self.scheme.bits_per_weight / 8
        return max(found, self._sharing(node) / (node.cores * each)) if node.cores and each else found

    def _with_both(self, slot: DeviceSlot, moved: Offloaded, share: float, rows: float, time: StepTime, rates: Rates) -> StepTime:
        """Weights in host memory beside our fused kernels: the CPU computes a part of them where they lie, while the device fetches the rest."""
        if not moved.host or not self.kernel_pass.has(slot):
            return time
        node = self.hardware.nodes[slot.node]
        both = node.ram_bandwidth / self._sharing(node) * rates.host_read
        link = min(self._link(slot, node, rates) * (1.0 if rates is IDEAL or self.spec.experts is None else FETCHED), both)
        cpu = both - link if rates is IDEAL else min(both - link, HOST_PRODUCT_BYTES / self._rows_per_expert(rows))
        first, last = self.fit.stages[slot.pp]
        if self.spec.experts is None:
            exchange = 0.0 if rates is IDEAL else (last - first) * EXCHANGE_SECONDS
            return replace(time, host_link=0.0, expert_fetch=moved.host / (cpu + link) + exchange)
        disk = node.disk_bandwidth / self._sharing(node) * rates.host_read
        missing = share * moved.disk_experts
        if rates is IDEAL:  # what is on disk is read while the rest is computed
            return replace(time, expert_fetch=min(max(share * moved.host_experts / both, missing / disk), time.expert_fetch))
        layers = self.model.sizes.routed_layers((first, last))
        blocks = num_blocks(self.spec.experts.intermediate_size)
        reads = HostReads(share * moved.host_experts / layers, cpu, link, blocks, rows)
        waiting = layers * waiting_seconds(reads, (time.memory + time.compute + time.kernels) / layers)
        if missing:
            shard = self._shard(slot)
            each = shard.between(shard.experts, (first, last)) / (layers * self.spec.experts.num_experts)
            misses = Misses(missing, each, layers)
            return replace(time, expert_fetch=misses.waiting_seconds(waiting / layers, both, disk * IN_BURSTS))
        return replace(time, expert_fetch=min(waiting, time.expert_fetch))

    def _streamed(self, slot: DeviceSlot, moved: Offloaded, share: float, passes: int, time: StepTime, rates: Rates) -> StepTime:
        node = self.hardware.nodes[slot.node]
        link, disk = self._link(slot, node, rates), node.disk_bandwidth / self._sharing(node) * rates.host_read
        return replace(
            time,
            host_link=passes * moved.host_always / link,
            disk=passes * moved.disk_always / disk,
            expert_fetch=passes * share * (moved.host_experts / link + moved.disk_experts / disk),
        )

    def _sharing(self, node: Node) -> int:
        """Devices of a node that use its memory at the same time: stages take turns."""
        return min(self.layout.tp, len(node.devices)) if self.layout.pp > 1 else len(node.devices)

    def _link(self, slot: DeviceSlot, node: Node, rates: Rates) -> float:
        ram = node.ram_bandwidth / self._sharing(node)
        return min(slot.device.host_bandwidth or node.ram_bandwidth, ram) * rates.host_stream

    def _share(self, rows: float, lossless: bool) -> float:
        """Fraction of the local experts that a step reads; ranks that hold experts for several replicas see all their tokens."""
        tokens = rows * max(self.layout.ep / self.layout.tp, 1.0)
        return touched_share(self.spec, tokens) if lossless else busiest_share(self.spec, tokens, self.layout.ep)

    def _slot_time(self, slot: DeviceSlot, work: Work, rates: Rates) -> StepTime:
        bandwidth, flops = slot.device.measured_bandwidth, self._matmul_rate(slot.device)
        if rates is IDEAL:
            memory, compute = work.floor(bandwidth, flops * (INTEGER_PEAK if slot.device.kind == "cpu" else 1.0))
        else:
            memory, compute = work.seconds(
                self._unpacked(bandwidth, num_cores(slot.device), rates), flops * self._type_share(slot.device, rates), rates
            )
        return StepTime(memory=memory, compute=compute)

    def _unpacked(self, bandwidth: float, cores: int, rates: Rates) -> float:
        """Bytes per second that cores both read and unpack. The two overlap, but not wholly: their times add up as squares do."""
        if not cores or not rates.core_weights:
            return bandwidth
        each = rates.core_weights * (rates.grid_weights if self.scheme.is_grid else 1.0) * self.scheme.bits_per_weight / 8
        return (bandwidth**-2 + (cores * each) ** -2) ** -0.5

    def _type_share(self, device: Device, rates: Rates) -> float:
        """Of an engine's rate of products, with these weights: a CPU multiplies 16-bit ones as fp32, not as bytes."""
        if device.kind == "cpu" and self.scheme.bits >= 16:
            return min(1 / rates.product, 1.0)
        return rates.grid_product if self.scheme.is_grid else 1.0

    def _launch(self, layers: Interval, device: Device, rates: Rates) -> float:
        key = (layers, device.name)
        if key not in self._launches:
            self._launches[key] = launch_seconds(self.spec, layers, rates, num_cores(device))
        return self._launches[key]

    def _always(self, shard: TpShard, layers: Interval, moved: Offloaded) -> float:
        """Bytes of the matrices that every token uses; streamed ones are read from device memory too, after they are loaded."""
        always = shard.between(shard.always, layers)
        if self.engine.cpu_layers:
            always -= moved.host_always
        if self.model.is_last(layers):
            always += head_reads(self.spec, shard)
        return always * self.rest

    def _rates(self, slot: DeviceSlot) -> Rates:
        own = self.engine.rates.get("kernels")
        if own is not None and self.kernel_pass.has(slot):
            return own
        blocks = self.engine.rates.get("ggml") if slot.device.kind != "cpu" and self.scheme.name in GGUF_NAMES else None
        return blocks or rates_on(self.engine, slot.device)

    def _shard(self, slot: DeviceSlot) -> TpShard:
        return self.model.sizes.shard(self.layout, self.scheme, slot.tp, self.fit.shares)

    def _matmul_rate(self, device: Device) -> float:
        """fp8 weights use fp8 activations if the device supports it; integer weights are dequantized to bf16 first."""
        return device.matmul_flops("fp8" if self.scheme.name == "fp8" else "bf16")

    def device_work(self, batch: float, context: float) -> tuple[DeviceSlot, Work, dict[str, tuple[float, float]]]:
        """Of the slowest device: its work in a decode step, and the seconds of reads and of products by kind."""
        seconds = self.slot_seconds(batch, context)
        at = seconds.index(max(seconds))
        slot, moved = self.fit.slots[at], self.fit.offloaded[at]
        shard, layers, rows = self._shard(slot), self.fit.stages[slot.pp], batch * self.rows
        cache = self.model.sizes.cache_bytes(layers, round(context), self.scheme, windowed=True) * shard.kv_share * batch
        work = self._work(shard, layers, moved, rows, 1, False, cache=cache, context=context)
        rates = IDEAL if self.kernel_pass.runs(slot, moved) else self._rates(slot)
        bandwidth = self._unpacked(slot.device.measured_bandwidth, num_cores(slot.device), rates)
        return slot, work, work.parts(bandwidth, self._matmul_rate(slot.device), rates)

    def step_bytes(self, slot: DeviceSlot, share: float, context: int, batch: int) -> float:
        """Weights and KV cache that a device reads per step."""
        shard, layers = self._shard(slot), self.fit.stages[slot.pp]
        cache = self.model.sizes.cache_bytes(layers, context, self.scheme, windowed=True) * shard.kv_share * batch
        return self._always(shard, layers, Offloaded()) + shard.between(shard.experts, layers) * share + cache

    # --- whole steps

    def decode(self, batch: int, context: float, *, lossless: bool = False) -> tuple[float, float, StepTime]:
        """(tokens per second of a replica, seconds per step, time of the slowest stage).

        Sequences go through the stages as one batch, or as pp micro-batches that keep every stage busy, whichever is faster.
        """
        whole = [self.decode_stage(pp, batch, context, lossless=lossless) for pp in range(self.layout.pp)]
        seconds = sum(time.total for time in whole)
        rate = batch / seconds
        worst = max(whole, key=lambda time: time.total)
        if self.layout.pp > 1 and batch >= self.layout.pp:
            group = batch / self.layout.pp
            parts = [self.decode_stage(pp, group, context, lossless=lossless) for pp in range(self.layout.pp)]
            slowest = max(parts, key=lambda time: time.total)
            busy = 1.0 if lossless else rates_on(self.engine, self.fit.slots[0].device).pipeline
            if group / slowest.total * busy > rate:
                rate, seconds, worst = group / slowest.total * busy, slowest.total * self.layout.pp / busy, slowest
        return rate * self.model.workload.tokens_per_step, seconds, worst

    def prefill(self, prompt: int, prompts: int) -> tuple[float, float]:
        """(seconds to prefill `prompts` of this length in one batch; seconds of the slowest stage).

        Steps follow each other through the stages: the first takes all of them, each further one only waits for the slowest.
        """
        stages = [self._prefill_stage(pp, prompt, prompts) for pp in range(self.layout.pp)]
        chunks = self._chunks(prompt * prompts)
        return sum(stages) / chunks + max(stages) * (chunks - 1) / chunks, max(stages)

    def _chunks(self, tokens: int) -> int:
        return ceil(tokens / self.step_tokens)

    @property
    def step_tokens(self) -> int:
        device = self.fit.slots[0].device
        if device.kind == "cpu":
            return CPU_STEP_TOKENS
        if self.fit.host_bytes and self.engine.offload_steps:
            return offload_step_tokens(self.spec, device.memory_bytes)
        return self.model.step_tokens(device)

    def _prefill_stage(self, pp: int, prompt: int, prompts: int) -> float:
        tokens = prompt * prompts
        times = [
            self._prefill_slot(slot, moved, prompt, prompts, self._chunks(tokens))
            for slot, moved in zip(self.fit.slots, self.fit.offloaded, strict=True)
            if slot.pp == pp
        ]
        return self._communicating(max(times, key=lambda time: time.total), pp, tokens).total

    def _prefill_slot(self, slot: DeviceSlot, moved: Offloaded, prompt: int, prompts: int, chunks: int) -> StepTime:
        shard, layers, tokens = self._shard(slot), self.fit.stages[slot.pp], prompt * prompts
        # Only the last token of a prompt needs the head.
        work = self._work(shard, layers, moved, tokens, chunks, False, cache=0.0, context=prompt / 2, head_rows=prompts)
        rates = self._rates(slot)
        if not self.kernel_pass.runs(slot, moved):
            launches = self._launch(layers, slot.device, rates)
            time = replace(self._slot_time(slot, work, rates), kernels=chunks * launches, front_end=chunks * rates.step_seconds)
            return self._prefill_offloaded(slot, moved, tokens, chunks, time, rates)
        floor = self._slot_time(slot, work, IDEAL)
        return beyond(floor, chunks * self.kernel_pass.seconds(slot, ceil(tokens / chunks), ceil(prompts / chunks), prompt // 2))

    def _prefill_offloaded(
        self, slot: DeviceSlot, moved: Offloaded, tokens: int, chunks: int, time: StepTime, rates: Rates
    ) -> StepTime:
        """What lies in host memory is copied to the device step by step, or, if that is quicker, computed by the CPU."""
        share = self._share(tokens / chunks, False)
        streamed = self._streamed(slot, moved, share, chunks, time, rates)
        if slot.device.kind == "cpu" or not moved.host:
            return streamed
        if not self.engine.cpu_layers:  # whole layers are copied ahead of their use
            return replace(streamed, host_link=streamed.host_link + streamed.expert_fetch, expert_fetch=0.0)
        node, shard, layers = self.hardware.nodes[slot.node], self._shard(slot), self.fit.stages[slot.pp]
        flops = tokens * shard.between(shard.expert_flops, layers) * self._away(shard, layers, moved)
        if moved.host_always:
            dense = shard.between(shard.flops_per_token, layers) - shard.between(shard.expert_flops, layers)
            flops += tokens * dense * moved.host_always / max(shard.between(shard.always, layers), 1.0)
        rows = self._rows_per_expert(tokens / chunks)
        filled = rows / (rows + rates.host_half_rows)
        by_cpu = flops / (
            _host_flops(node) / self._sharing(node) * rates.host_product * filled * self._type_share(slot.device, rates)
        )
        by_link = chunks * (moved.host_always + share * moved.host_experts) / self._link(slot, node, rates)
        disk = streamed.disk + chunks * share * moved.disk_experts / node.disk_bandwidth
        return replace(time, host_compute=min(by_cpu, by_link), disk=disk)


def _host_flops(node: Node) -> float:
    """Products of the host beside a device, by its cores if they are known, else by the speed of its memory. Hosts of published rows have AVX-512."""
    cores = node.cores or min(max(node.ram_bandwidth / HOST_BYTES_PER_CORE, 4.0), MOST_HOST_CORES)
    return cores * HOST_ISA.get(node.isa, 1.0) * PEAK_FLOPS_PER_CORE * MATMUL_FRACTION
