"""Which devices to plan for: all of them; and of unequal devices also subsets.

Decode waits for the slowest device of a tp group, so one fast node may beat all devices together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import msgspec

from windlass.core.hardware.cpu import cpu_device
from windlass.core.hardware.spec import Device, Hardware, Node
from windlass.core.layout import Layout
from windlass.tasks.plan.memory import DeviceSlot

Place = tuple[int, int]
"""A device: index of its node and index in the node, in the user's order."""


@dataclass(frozen=True)
class Site:
    """A set of devices for the search, fastest nodes first, with lookups cached."""

    hardware: Hardware
    places: tuple[Place, ...]

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        return self.hardware.devices

    @cached_property
    def nodes_of(self) -> tuple[int, ...]:
        return tuple(index for index, node in enumerate(self.hardware.nodes) for _ in node.devices)

    @cached_property
    def uniform(self) -> bool:
        return self.hardware.uniform

    def slots(self, layout: Layout, tp_indices: tuple[int, ...]) -> tuple[DeviceSlot, ...]:
        """Devices of the first replica, for these tp indices."""
        return tuple(
            DeviceSlot(device=self.devices[pp * layout.tp + tp], node=self.nodes_of[pp * layout.tp + tp], tp=tp, pp=pp)
            for pp in range(layout.pp)
            for tp in tp_indices
        )

    def group_spans_nodes(self, layout: Layout) -> bool:
        """Whether a tp group would communicate over the network."""
        if layout.tp == 1 or len(self.hardware.nodes) == 1:
            return False
        nodes = self.nodes_of
        return any(nodes[first] != nodes[first + layout.tp - 1] for first in range(0, layout.tp * layout.pp, layout.tp))


def split_cpus(hardware: Hardware, degrees: dict[str, int]) -> Hardware:
    """Splits CPUs into several devices, if the user pinned more ranks than there are machines: each gets part of the cores and memory."""
    ranks = prod(degrees.get(name, 1) for name in ("tp", "pp", "dp"))
    each, left = divmod(ranks, hardware.num_devices)
    if each < 2 or left or any(device.kind != "cpu" for device in hardware.distinct_devices):
        return hardware
    made = {id(node): _split_cpu(node, each) for node in hardware.distinct_nodes}
    return msgspec.structs.replace(hardware, nodes=tuple(made[id(node)] for node in hardware.nodes))


def _split_cpu(node: Node, ranks: int) -> Node:
    (whole,) = node.devices
    cores = int(whole.name.rpartition(":")[2])
    part = cpu_device(max(cores // ranks, 1), whole.memory_bytes // ranks, whole.measured_bandwidth / ranks, whole.source)
    return msgspec.structs.replace(node, devices=(part,) * ranks)


METAL_DEFAULT, METAL_MOST = 0.75, 0.94
"""Part of a Mac's memory that Metal lends by default (the catalog's figure), and the most that is lent if the limit is raised
(`sudo sysctl iogpu.wired_limit_mb=N`); the rest is the system's."""


def raised_limit(hardware: Hardware) -> Hardware | None:
    """The same Macs with their limit raised; None where there are none."""
    metal = [device for device in hardware.distinct_devices if device.kind == "metal"]
    if not metal:
        return None
    grown = {
        id(device): msgspec.structs.replace(device, memory_bytes=int(device.memory_bytes / METAL_DEFAULT * METAL_MOST))
        for device in metal
    }
    nodes = {
        id(node): msgspec.structs.replace(node, devices=tuple(grown.get(id(device), device) for device in node.devices))
        for node in hardware.distinct_nodes
    }
    return msgspec.structs.replace(hardware, nodes=tuple(nodes[id(node)] for node in hardware.nodes))


def whole_site(hardware: Hardware) -> Site:
    return Site(hardware, tuple((index, at) for index, node in enumerate(hardware.nodes) for at in range(len(node.devices))))


def sites(hardware: Hardware) -> list[list[Site]]:
    """In order of preference: accelerators, CPUs, all devices; each with its subsets."""
    if hardware.uniform:
        return [[whole_site(hardware)]]
    kinds = {device.kind for device in hardware.distinct_devices}
    accelerated = _parts(hardware, lambda device: device.kind != "cpu") if kinds - {"cpu"} else []
    processors = _parts(hardware, lambda device: device.kind == "cpu") if "cpu" in kinds else []
    tiers = [tier for tier in (accelerated, processors) if tier]
    if len(tiers) > 1:
        tiers.append([_part(hardware, lambda _node, _device: True)])
    return tiers


def _parts(hardware: Hardware, wanted: Callable[[Device], bool]) -> list[Site]:
    """All wanted devices, each device type alone, and each node alone."""
    made = [_part(hardware, lambda _node, device: wanted(device))]
    names = {device.name: None for device in hardware.distinct_devices if wanted(device)}
    made += [_part(hardware, lambda _node, device, name=name: device.name == name) for name in names]
    for node in hardware.distinct_nodes:
        if any(wanted(device) for device in node.devices):
            first = next(index for index, other in enumerate(hardware.nodes) if other is node)
            made.append(_part(hardware, lambda index, device, first=first: index == first and wanted(device)))
    distinct = {site.places: site for site in made}
    return list(distinct.values())


def _part(hardware: Hardware, wanted: Callable[[int, Device], bool]) -> Site:
    """The wanted devices, fastest nodes first, and fastest first within a node."""
    kept: list[tuple[Node, list[Place]]] = []
    for index, node in enumerate(hardware.nodes):
        chosen = sorted(
            (at for at, device in enumerate(node.devices) if wanted(index, device)),
            key=lambda at: -node.devices[at].measured_bandwidth,
        )
        if chosen:
            part: Node = msgspec.structs.replace(node, devices=tuple(node.devices[at] for at in chosen))
            kept.append((part, [(index, at) for at in chosen]))
    kept.sort(key=lambda one: -one[0].devices[0].measured_bandwidth)
    nodes = tuple(node for node, _ in kept)
    network = hardware.network_bandwidth if len(nodes) > 1 else 0.0
    made: Hardware = msgspec.structs.replace(hardware, nodes=nodes, network_bandwidth=network)
    return Site(made, tuple(place for _, places in kept for place in places))
