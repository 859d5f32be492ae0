"""Hardware with less memory than it has: what --gpu-memory and --host-memory leave of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from windlass.core.hardware.spec import Device, Hardware, Node
from windlass.units import format_bytes


def capped(hardware: Hardware, gpu_memory: Sequence[int] = (), host_memory: int | None = None) -> Hardware:
    """`gpu_memory`: bytes of each device of a node in turn; the last one counts for all that follow. A CPU's memory is its node's."""
    if not gpu_memory and host_memory is None:
        return hardware
    known: dict[int, Node] = {}  # thousands of equal nodes are one object repeated
    for node in hardware.distinct_nodes:
        known[id(node)] = _capped_node(node, gpu_memory, host_memory)
    limits = [("a GPU", size) for size in gpu_memory] + ([("RAM", host_memory)] if host_memory is not None else [])
    shown = ", ".join(f"{format_bytes(size)} of {name}" for name, size in limits)
    described = f"{hardware.description} (at most {shown})"
    nodes = tuple(known[id(node)] for node in hardware.nodes)
    return msgspec.structs.replace(hardware, nodes=nodes, description=described)


def _capped_node(node: Node, gpu_memory: Sequence[int], host_memory: int | None) -> Node:
    devices = tuple(_capped_device(device, index, gpu_memory, host_memory) for index, device in enumerate(node.devices))
    ram = node.ram_bytes if host_memory is None else min(node.ram_bytes, host_memory)
    return msgspec.structs.replace(node, devices=devices, ram_bytes=ram)


def _capped_device(device: Device, index: int, gpu_memory: Sequence[int], host_memory: int | None) -> Device:
    cap = host_memory if device.kind == "cpu" else (gpu_memory[min(index, len(gpu_memory) - 1)] if gpu_memory else None)
    return device if cap is None else msgspec.structs.replace(device, memory_bytes=min(device.memory_bytes, cap))
