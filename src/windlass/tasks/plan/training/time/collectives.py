"""Time of collectives on a link, with ring algorithms as in NCCL. Knows no model.

Bus-bandwidth factors: all-reduce 2 (n-1)/n, all-gather, reduce-scatter and all-to-all (n-1)/n of the bytes
(nccl-tests doc/PERFORMANCE.md).
"""

from __future__ import annotations

from windlass.core.hardware.spec import Hardware
from windlass.core.model import Frozen

LINK_FRACTION = 0.8
"""Ring bus bandwidth over a link's one-way specification, large messages: 8x A100 235 of 300 GB/s (78 %), 8x H200 all-gather 361
and reduce-scatter 363 of 450 (80 %), all-reduce 367 (82 %), 8x B200 682 of 900 (76 %) (stas00/ml-engineering network benchmarks)."""

NETWORK_FRACTION = 0.9
"""The same between nodes, over the node's network cards together: 4 nodes of H200 on 8 x 50 GB/s EFA 365 (91 %), of B200 382 (95 %)
(same source)."""

RING_STEP_SECONDS = 4.5e-6
"""Latency of one ring step inside a node. From dgxc-benchmarking's NCCL table for 8 x H100: all-reduce runs at 237 GB/s of bus
bandwidth with 16 MiB and at 480 with gigabytes, so 16 MiB * 1.75 * (1/237e9 - 1/480e9) = 63 us for 14 steps."""


class RankGroup(Frozen):
    """A communication group: its size, and how many of its ranks are in one node."""

    size: int
    local: int


def group_of(size: int, stride: int, devices_per_node: int) -> RankGroup:
    """`stride`: ranks between neighbours of the group. Order tp-cp-ep-dp-pp, tp fastest (Megatron-Core parallel_state)."""
    return RankGroup(size=size, local=max(1, min(size, devices_per_node // stride)))


class Links(Frozen):
    link_bandwidth: float
    """Bytes per second and direction that a device reaches inside a node."""
    network_bandwidth: float
    """The same, per device, between nodes."""
    network_latency_seconds: float

    def ring_bandwidth(self, group: RankGroup) -> float:
        """A ring crosses every node once; the group's NICs of a node share the traffic."""
        if group.local >= group.size:
            return self.link_bandwidth
        return min(self.link_bandwidth, group.local * self.network_bandwidth) if group.local > 1 else self.network_bandwidth

    def ring_latency(self, group: RankGroup) -> float:
        """Of the n - 1 steps of one round."""
        nodes = -(-group.size // group.local)
        return (group.size - nodes) * RING_STEP_SECONDS + (nodes - 1) * self.network_latency_seconds

    def gather(self, full_bytes: float, group: RankGroup, pieces: int = 1) -> float:
        """All-gather to, or reduce-scatter from, `full_bytes` per rank, in `pieces` collectives."""
        if group.size == 1 or not full_bytes:
            return 0.0
        return (group.size - 1) / group.size * full_bytes / self.ring_bandwidth(group) + pieces * self.ring_latency(group)

    def all_reduce(self, full_bytes: float, group: RankGroup) -> float:
        return 2 * self.gather(full_bytes, group)

    def exchange(self, sent_bytes: float, group: RankGroup, remote_share: float | None = None) -> float:
        """All-to-all: each rank sends `sent_bytes` evenly. Traffic within the node and between nodes overlaps.

        `remote_share`: fraction of `sent_bytes` that crosses the network, if duplicates for one node are sent once.
        """
        if group.size == 1:
            return 0.0
        inside = sent_bytes * (group.local - 1) / group.size / self.link_bandwidth
        share = (group.size - group.local) / group.size if remote_share is None else remote_share
        if group.local >= group.size:
            return inside + RING_STEP_SECONDS
        return max(inside, sent_bytes * share / self.network_bandwidth) + self.network_latency_seconds

    def send(self, sent_bytes: float, inside_node: bool) -> float:
        if inside_node:
            return sent_bytes / self.link_bandwidth + RING_STEP_SECONDS
        return sent_bytes / self.network_bandwidth + self.network_latency_seconds


def links_of(hardware: Hardware) -> Links:
    device = hardware.devices[0]
    link = device.link_bandwidth or device.host_bandwidth
    return Links(
        link_bandwidth=link * LINK_FRACTION,
        network_bandwidth=(hardware.network_bandwidth or link) * NETWORK_FRACTION,
        network_latency_seconds=hardware.network_latency_seconds,
    )


def remote_copies(num_nodes: int, num_active: int, node_limit: int | None) -> float:
    """Expected number of other nodes a token is sent to, once each, with even routing: (M-1) (1 - (1 - 1/M)^k), at most the
    limit of group-limited routing (arXiv 2412.19437, 2.1.2)."""
    expected = (num_nodes - 1) * (1 - (1 - 1 / num_nodes) ** num_active)
    return min(expected, node_limit * (num_nodes - 1) / num_nodes) if node_limit else expected
