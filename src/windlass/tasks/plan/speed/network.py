"""Time of a stage's communication: all-reduces of tensor parallelism, the exchange of experts, and the hop to the next stage."""

from __future__ import annotations

from math import ceil, log2

from windlass.core.hardware.spec import Hardware
from windlass.core.layout import Layout
from windlass.core.model import ModelSpec, MoE, Wiring
from windlass.core.place import Interval
from windlass.tasks.plan.engines.load import rates_on
from windlass.tasks.plan.engines.profile import ACTIVATION_BYTES, CPU_ACTIVATION_BYTES, EngineProfile, Rates
from windlass.tasks.plan.memory import DeviceSlot, Fit

COLLECTIVE_SECONDS = {"nvlink": 8e-6, "pcie": 20e-6, "memory": 5e-6}
"""Latency of a small all-reduce inside a node where the engine's file has none; 10 us point to point is aiconfigurator's figure, ours lies
around it. Processes on one machine that share memory exchange two or three cache lines (an assumption)."""
PEER_SECONDS = 0.5e-6
"""Added by each further peer to an all-to-all of small messages (an assumption: about one posted write each)."""
COMBINE_BYTES = 2
"""Results of experts come back in bf16."""


class Network:
    def __init__(self, spec: ModelSpec, engine: EngineProfile, hardware: Hardware, layout: Layout, fit: Fit, bits: int) -> None:
        self.spec, self.engine, self.hardware, self.layout, self.fit = spec, engine, hardware, layout, fit
        self.dispatch_bytes = 1 if bits <= 8 else 2
        """Tokens go out in fp8 where the experts are computed in it."""

    def stage(self, pp: int, tokens: float) -> float:
        """All-reduces of a stage, and the hop to the next."""
        layers = self.fit.stages[pp]
        element_bytes = CPU_ACTIVATION_BYTES if self.fit.slots[0].device.kind == "cpu" else ACTIVATION_BYTES
        message = tokens * self.spec.hidden_size * element_bytes
        seconds = self._reduces(layers) * self._all_reduce(pp, message) if self.layout.tp > 1 else 0.0
        return seconds + (self._hop(pp, message) if pp + 1 < self.layout.pp else 0.0)

    def _reduces(self, layers: Interval) -> int:
        return sum(
            1 if layer.wiring in (Wiring.PARALLEL, Wiring.PARALLEL_ONE_NORM) else 2
            for layer in self.spec.layers[layers[0] : layers[1]]
        )

    def exchange(self, pp: int, tokens: float) -> float:
        """Expert parallelism across replicas: two all-to-alls per layer, to dispatch `tokens` of a replica and to combine results.

        A token goes once to each node that holds one of its experts, and is spread there over the faster links (DeepEP).
        """
        experts, ranks = self.spec.experts, self.layout.ep
        if experts is None or ranks <= self.layout.tp:
            return 0.0
        layers = self.fit.stages[pp]
        mixtures = sum(isinstance(layer.feed_forward, MoE) for layer in self.spec.layers[layers[0] : layers[1]])
        device, near = self._group(pp)[0].device, min(ranks, len(self.hardware.nodes[0].devices))
        rates, own = rates_on(self.engine, device), tokens / self.layout.tp * self.spec.hidden_size
        element = self.dispatch_bytes + COMBINE_BYTES
        inside = own * distinct(near, experts.num_active * near / ranks) * element
        inside /= (device.link_among(near) or device.host_bandwidth) * rates.collective
        nodes = ranks / near
        if nodes <= 1:
            return mixtures * (inside + 2 * (COLLECTIVE_SECONDS["nvlink"] + ranks * PEER_SECONDS))
        far = own * distinct(nodes, experts.num_active) * (nodes - 1) / nodes * element
        outside = far / (self.hardware.network_bandwidth * rates.collective)
        latency = 2 * (2 * self.hardware.network_latency_seconds + ranks * PEER_SECONDS)
        return mixtures * (max(inside, outside) + latency)

    def _group(self, pp: int) -> list[DeviceSlot]:
        return [slot for slot in self.fit.slots if slot.pp == pp]

    def _all_reduce(self, pp: int, num_bytes: float) -> float:
        """Ring all-reduce: 2 (n - 1) / n of the message (nccl-tests), plus a latency that grows with log n between nodes."""
        ranks = self.layout.tp
        if ranks == 1:
            return 0.0
        group = self._group(pp)
        rates = rates_on(self.engine, group[0].device)
        bandwidth, latency = self._link(group, ranks, rates)
        return latency + 2 * (ranks - 1) / ranks * num_bytes / (bandwidth * rates.collective)

    def _link(self, group: list[DeviceSlot], ranks: int, rates: Rates) -> tuple[float, float]:
        if len({slot.node for slot in group}) > 1:
            latency = self.hardware.network_latency_seconds * max(2 * ceil(log2(ranks)), (ranks - 1) ** 2 * rates.peers)
            return self.hardware.network_bandwidth or 1.25e9, latency
        slowest = min(group, key=lambda slot: slot.device.link_bandwidth).device
        bandwidth = slowest.link_among(ranks) or slowest.host_bandwidth or slowest.bandwidth
        if len({slot.device.name for slot in group}) > 1:  # different cards have no NVLink between them
            bandwidth = min(bandwidth, *(slot.device.host_bandwidth or bandwidth for slot in group))
        if slowest.kind == "cpu":
            return bandwidth, COLLECTIVE_SECONDS["memory"]
        usual = COLLECTIVE_SECONDS["nvlink" if bandwidth > 100e9 else "pcie"]
        return bandwidth, max(rates.collective_seconds, usual)

    def _hop(self, pp: int, num_bytes: float) -> float:
        here, there = self._group(pp)[0], self._group(pp + 1)[0]
        if here.node != there.node:
            return self.hardware.network_latency_seconds + num_bytes / (self.hardware.network_bandwidth or 1.25e9)
        return 10e-6 + num_bytes / (here.device.link_bandwidth or here.device.host_bandwidth or 1e9)


def distinct(places: float, picks: float) -> float:
    """Expected places that `picks` even draws fall into."""
    return places * (1 - (1 - 1 / places) ** picks) if places > 1 else min(picks, 1.0)
