"""Which devices to plan for. Alike ones are taken as they are; of unlike ones, sensible parts are tried beside the whole.

Decode waits for the slowest of those that share a layer, so a quick node alone may beat all devices together.
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
from windlass.plan.memory import DeviceSlot

Place = tuple[int, int]
"""A device: its node, and its number in the node, as the user gave them."""


@dataclass(frozen=True)
class Site:
    """Hardware as the search walks it: quickest nodes first, every device with its node, looked up once."""

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

    def seats(self, layout: Layout, tp_indices: tuple[int, ...]) -> tuple[DeviceSlot, ...]:
        """The first replica, or of each of its tp groups the indices that stand for all."""
        return tuple(
            DeviceSlot(device=self.devices[pp * layout.tp + tp], node=self.nodes_of[pp * layout.tp + tp], tp=tp, pp=pp)
            for pp in range(layout.pp)
            for tp in tp_indices
        )

    def group_spans_nodes(self, layout: Layout) -> bool:
        """Whether ranks that share every layer would talk over the network."""
        if layout.tp == 1 or len(self.hardware.nodes) == 1:
            return False
        nodes = self.nodes_of
        return any(nodes[first] != nodes[first + layout.tp - 1] for first in range(0, layout.tp * layout.pp, layout.tp))


def processes(hardware: Hardware, degrees: dict[str, int]) -> Hardware:
    """CPUs shared out among processes, where the user pinned more ranks than there are machines: each has its part of the cores and the memory."""
    ranks = prod(degrees.get(name, 1) for name in ("tp", "pp", "dp"))
    each, left = divmod(ranks, hardware.num_devices)
    if each < 2 or left or any(device.kind != "cpu" for device in hardware.distinct_devices):
        return hardware
    made = {id(node): _shared_out(node, each) for node in hardware.distinct_nodes}
    return msgspec.structs.replace(hardware, nodes=tuple(made[id(node)] for node in hardware.nodes))


def _shared_out(node: Node, ranks: int) -> Node:
    (whole,) = node.devices
    cores = int(whole.name.rpartition(":")[2])
    part = cpu_device(max(cores // ranks, 1), whole.memory_bytes // ranks, whole.measured_bandwidth / ranks, whole.source)
    return msgspec.structs.replace(node, devices=(part,) * ranks)


def whole_site(hardware: Hardware) -> Site:
    return Site(hardware, tuple((index, at) for index, node in enumerate(hardware.nodes) for at in range(len(node.devices))))


def sites(hardware: Hardware) -> list[list[Site]]:
    """In order of preference: accelerators, then CPUs alone, then everything together; within each the parts worth trying."""
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
    """All of them, each kind by itself, and each node by itself."""
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
    """Nodes with only the wanted devices, quickest first; inside a node too."""
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
