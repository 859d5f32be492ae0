"""Formats hardware in the one-line form that `parse` reads. Exact if the catalog knows the devices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from windlass.core.hardware.cpu import default_bandwidth, default_ram_bytes
from windlass.core.hardware.defaults import DISK_BYTES, node_ram_bytes, usual_latency
from windlass.core.hardware.devices import catalog
from windlass.core.hardware.spec import Device, Hardware, Node
from windlass.units import GB, GIB, KB, KIB, MB, MIB, TB

_SIZES = (("TB", TB), ("GB", GB), ("GiB", GIB), ("MB", MB), ("MiB", MIB), ("KB", KB), ("KiB", KIB))
_RATES = (("Tb", 10**12), ("Gb", 10**9), ("Mb", 10**6), ("Kb", 10**3))
_NODE_DEFAULTS = Node(devices=(), ram_bytes=0, disk_bytes=0)


def describe(hardware: Hardware) -> str:
    """`4x(8xH100-80GB)@400Gb`. What equals the default is left out."""
    groups = [(node, len(list(equal))) for node, equal in groupby(hardware.nodes)]  # equal objects are compared by identity first
    if len(hardware.nodes) == 1:
        return _one_node(hardware.nodes[0])
    nodes = "+".join(f"{count}x({_node(node)})" for node, count in groups)
    latency = hardware.network_latency_seconds
    stated = f",latency={_time(latency)}" if latency != usual_latency(hardware.network_bandwidth) else ""
    return f"{nodes}@{_rate(hardware.network_bandwidth)}{stated}"


def _one_node(node: Node) -> str:
    """Without brackets, except where a bare list would be read as several nodes."""
    known = catalog().get(node.devices[0].name)
    crowded = known is not None and len(node.devices) > known.per_node
    return f"1x({_node(node)})" if crowded else _node(node)


def _node(node: Node) -> str:
    first = node.devices[0]
    if first.kind == "cpu":
        cores = int(first.name.removeprefix("cpu:"))
        parts = [first.name + ("" if first.memory_bytes == node.ram_bytes else f"[{_size(first.memory_bytes)}]")]
        default_ram, default_bw = default_ram_bytes(cores), default_bandwidth(cores)
    else:
        parts = [_devices(node.devices)]
        default_ram, default_bw = node_ram_bytes(node.devices), _NODE_DEFAULTS.ram_bandwidth
    options = [
        ("ram", _size(node.ram_bytes), node.ram_bytes != default_ram),
        ("disk", _size(node.disk_bytes), node.disk_bytes != DISK_BYTES),
        ("bw", _size(round(node.ram_bandwidth)), node.ram_bandwidth != default_bw),
        ("disk_bw", _size(round(node.disk_bandwidth)), node.disk_bandwidth != _NODE_DEFAULTS.disk_bandwidth),
        ("name", node.name, node.name != ""),
        ("isa", first.isa or node.isa, bool(first.isa or node.isa)),
        ("cores", str(node.cores), node.cores > 0),
    ]
    return ",".join(parts + [f"{key}={value}" for key, value, stated in options if stated])


def _devices(devices: Sequence[Device]) -> str:
    return "+".join(f"{len(list(equal))}x{_device(device)}" for device, equal in groupby(devices))


def _device(device: Device) -> str:
    known = catalog().get(device.name)
    if known is None or known.memory_mib * MIB == device.memory_bytes:
        return device.name
    return f"{device.name}[{_size(device.memory_bytes)}]"


def _size(num_bytes: int) -> str:
    """Exact: in the largest unit that divides it."""
    return next((f"{num_bytes // size}{unit}" for unit, size in _SIZES if num_bytes and num_bytes % size == 0), f"{num_bytes}B")


def _rate(bytes_per_second: float) -> str:
    bits = round(bytes_per_second * 8)
    return next((f"{bits // size}{unit}" for unit, size in _RATES if bits and bits % size == 0), f"{max(bits // 1000, 1)}Kb")


def _time(seconds: float) -> str:
    nanoseconds = round(seconds * 1e9)
    return f"{nanoseconds // 1000}us" if nanoseconds % 1000 == 0 else f"{nanoseconds}ns"
