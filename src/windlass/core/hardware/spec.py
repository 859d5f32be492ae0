"""Devices, nodes and links. Values only: `parse` reads them from text, `machine.probe` from this machine."""

from __future__ import annotations

from itertools import chain

from windlass.core.model import Frozen


class Device(Frozen):
    """One accelerator, or all CPUs of one node. Peaks are dense; `measured_*` is what kernels reach."""

    name: str
    kind: str
    """`cuda`, `rocm`, `metal`, `xpu`, `hpu`, `tpu` or `cpu`."""
    memory_bytes: int
    """As the driver reports it, less any cap the user set."""
    bandwidth: float
    """Bytes per second, vendor's figure."""
    measured_bandwidth: float
    """Bytes per second that a plain read kernel reaches."""
    flops: dict[str, float]
    """Peak dense operations per second by type: bf16, fp8, int8, fp4."""
    measured_flops: dict[str, float]
    """What large matrix products reach."""
    link_bandwidth: float = 0.0
    """Bytes per second, one direction, to the other devices of the node."""
    link_name: str = ""
    link_peer_bandwidth: float = 0.0
    """For mesh topologies (AMD xGMI): bandwidth to any one other device; 0 with a switch."""
    host_bandwidth: float = 0.0
    """Bytes per second between the device and host memory (PCIe); the memory's own speed on a CPU."""
    watts: float = 0.0
    source: str = ""
    isa: str = ""
    """Widest vector instructions of a CPU: avx2, avx512, amx, neon; empty: not known."""

    def matmul_flops(self, kind: str) -> float:
        """FLOP/s to plan with: measured for this type, else for bf16."""
        return self.measured_flops.get(kind) or self.measured_flops["bf16"]

    def link_among(self, num_devices: int) -> float:
        """Bytes per second, one direction, per device in a group of this many devices of a node."""
        if not self.link_peer_bandwidth:
            return self.link_bandwidth
        return min(self.link_bandwidth, self.link_peer_bandwidth * max(num_devices - 1, 1))


class Node(Frozen):
    devices: tuple[Device, ...]
    ram_bytes: int
    """On a CPU node this is also the device's memory: do not add the two."""
    disk_bytes: int
    disk_bandwidth: float = 3e9
    """Sequential read, bytes per second (a datacentre NVMe; a probe measures nothing here)."""
    ram_bandwidth: float = 100e9
    name: str = ""
    cores: int = 0
    """Of the host beside accelerators; 0: not known."""
    isa: str = ""
    """Its widest vector instructions; empty: not known."""


class Hardware(Frozen):
    nodes: tuple[Node, ...]
    network_bandwidth: float = 0.0
    """Bytes per second, one direction, per device between nodes; 0 for a single node."""
    network_latency_seconds: float = 10e-6
    description: str = ""

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(chain.from_iterable(node.devices for node in self.nodes))

    @property
    def distinct_nodes(self) -> tuple[Node, ...]:
        """By identity: thousands of equal nodes are one object repeated."""
        return tuple({id(node): node for node in self.nodes}.values())

    @property
    def distinct_devices(self) -> tuple[Device, ...]:
        return tuple({id(device): device for node in self.distinct_nodes for device in node.devices}.values())

    @property
    def num_devices(self) -> int:
        return sum(len(node.devices) for node in self.nodes)

    @property
    def uniform(self) -> bool:
        return len(set(map(_shape, self.distinct_devices))) == 1 and len({len(node.devices) for node in self.distinct_nodes}) == 1

    @property
    def devices_per_node(self) -> int:
        return min(len(node.devices) for node in self.distinct_nodes)


def _shape(device: Device) -> tuple[str, int, float]:
    return device.name, device.memory_bytes, device.bandwidth
