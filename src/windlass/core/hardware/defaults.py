"""Default hardware figures for what the user does not state. Every one is an estimate with a source, and can be set by an option."""

from __future__ import annotations

from collections.abc import Iterable

from windlass.core.hardware.devices import catalog, nic_bandwidth
from windlass.core.hardware.spec import Device, Node
from windlass.units import MIB, TB

DISK_BYTES = 2 * TB
"""Typical for cloud GPU machines and workstations."""

RAM_PER_DEVICE_MEMORY = 2
"""RAM over the accelerators' memory: a DGX H100 has 3 (2 TB for 640 GB), a GCP a3-ultragpu-8g 2.6, an AWS p5en 1.9."""

CPU_NIC_BYTES_PER_SECOND = 0.125e9
"""1 Gb Ethernet, typical for home machines; clouds have 10 Gb and more."""


FAST_NETWORK = 100e9 / 8
RDMA_LATENCY_SECONDS = 10e-6
ETHERNET_LATENCY_SECONDS = 50e-6
"""TCP through a kernel and a switch takes tens of microseconds; RDMA networks of 100 Gb and more under ten."""


def usual_latency(bandwidth: float) -> float:
    return RDMA_LATENCY_SECONDS if bandwidth >= FAST_NETWORK or bandwidth == 0 else ETHERNET_LATENCY_SECONDS


def network_bandwidth(nodes: Iterable[Node]) -> float:
    """Bytes per second per device, one direction: of the slowest device type present."""
    distinct = {id(node): node for node in nodes}.values()
    kinds = {device.name: device.kind for node in distinct for device in node.devices}
    return min(CPU_NIC_BYTES_PER_SECOND if kind == "cpu" else nic_bandwidth(name) for name, kind in kinds.items())


def node_ram_bytes(devices: Iterable[Device]) -> int:
    """For a node with these accelerators."""
    return sum(map(_ram_bytes, devices))


def _ram_bytes(device: Device) -> int:
    """The CPU's part of unified memory; else a multiple of the device's (uncapped) memory."""
    known = catalog().get(device.name)
    if known is None:
        return RAM_PER_DEVICE_MEMORY * device.memory_bytes
    if known.host_share_mib is None:
        return RAM_PER_DEVICE_MEMORY * known.memory_mib * MIB
    default, lent = known.memory_mib * MIB, device.memory_bytes
    if lent > default:  # a raised limit: the host has what is left
        return known.host_share_mib * MIB - (lent - default)
    return known.host_share_mib * MIB * lent // default  # a smaller machine has a smaller share
