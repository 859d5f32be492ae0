"""Devices, nodes and links: what there is to run on. Values only: `machines` reads them from text, `machine.probe` from here."""

from __future__ import annotations

from itertools import chain

from windlass.core.model import Frozen


class Device(Frozen):
    """One accelerator, or the CPUs of one node taken together. Peaks are dense; `measured_*` is what kernels reach."""

    name: str
    kind: str
    """`cuda`, `rocm`, `metal` or `cpu`."""
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
    """Where links are a mesh (AMD xGMI), the part of `link_bandwidth` that reaches any one other device; 0 behind a switch."""
    host_bandwidth: float = 0.0
    """Bytes per second between the device and host memory (PCIe); the memory's own speed on a CPU."""
    watts: float = 0.0
    source: str = ""

    def matmul_flops(self, kind: str) -> float:
        """Operations per second to plan with: measured where somebody measured, else bf16's."""
        return self.measured_flops.get(kind) or self.measured_flops["bf16"]

    def link_among(self, num_devices: int) -> float:
        """Bytes per second, one direction, that a group of this many devices of a node has for each of its members."""
        if not self.link_peer_bandwidth:
            return self.link_bandwidth
        return min(self.link_bandwidth, self.link_peer_bandwidth * max(num_devices - 1, 1))


class Node(Frozen):
    devices: tuple[Device, ...]
    ram_bytes: int
    """Of a CPU node this is the device's own memory, once more: never add the two."""
    disk_bytes: int
    disk_bandwidth: float = 3e9
    """Sequential read, bytes per second (a datacentre NVMe; a probe measures nothing here)."""
    ram_bandwidth: float = 100e9
    name: str = ""


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
        """Thousands of alike nodes are one object repeated; by identity, so that a long list costs next to nothing."""
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
