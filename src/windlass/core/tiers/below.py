"""Experts on disk below host memory beside a device: how many, and how many of them host memory has room for at a time. Pure: the planner and the
engine decide the same.

Some experts have their home in host memory, where CPU and link work on them together; the rest of host memory is a cache of those on disk. With
even routing it does not matter how host memory is divided: a slot saves as many reads one way as the other. Real routing is uneven, and a cache
holds what is used (docs/reference/offload.md: half of the experts in a cache are found 78 % of the time, the same number of fixed ones 66 %). But
only homes use the link. So the cache has two slots for every expert that memory has no room for, and homes get the rest.
"""

from __future__ import annotations

from typing import NamedTuple

from windlass.core.tiers.device import RING_SLOTS, DevicePlan, DeviceSplit
from windlass.core.tiers.values import TierPlacement, in_blocks
from windlass.errors import DoesNotFit
from windlass.units import format_bytes

CACHED_PER_MISSING = 2
LEAST_CACHE_SLOTS = 16
"""More than a token needs of a layer."""


class RoomBelow(NamedTuple):
    """Bytes for experts below a device. `disk` 0: there is none."""

    host: int
    disk: int = 0
    written: int = 0
    """Experts of each layer that the file of an earlier run holds: writing it again takes long, so that as many are left there as can be."""


def with_disk(plan: DevicePlan, room: RoomBelow) -> DevicePlan:
    """The plan as it is if host memory holds what the device does not; else with experts on disk. Raises DoesNotFit."""
    if plan.host_bytes <= room.host:
        return plan
    if not room.disk:
        raise _no_disk(plan, room)
    return _checked(plan._replace(split=_split(plan, room)), room)


def planned_with_disk(plan: DevicePlan, planned: TierPlacement, room: RoomBelow) -> DevicePlan:
    """As a saved plan decided it."""
    split = plan.split
    on_disk = min(planned.disk_experts // split.num_layers, split.off_device)
    made = plan._replace(split=split._replace(on_disk=on_disk, cache_slots=planned.cache_slots if on_disk else 0))
    short = made.host_bytes - room.host
    if short > 0:
        raise DoesNotFit(
            f"the plan puts {format_bytes(made.host_bytes)} of weights into host memory, and {format_bytes(max(room.host, 0))} are left for them: "
            f"{format_bytes(short)} short; plan again with a smaller --host-memory",
            short,
        )
    return _checked(made, room)


def _split(plan: DevicePlan, room: RoomBelow) -> DeviceSplit:
    split, block = plan.split, in_blocks(plan.expert_bytes)
    slots = room.host // block - RING_SLOTS
    if slots < LEAST_CACHE_SLOTS:
        short = (LEAST_CACHE_SLOTS + RING_SLOTS) * block - room.host
        raise DoesNotFit(
            f"{format_bytes(max(room.host, 0))} of host memory are left for buffers of experts on disk, {format_bytes(short)} too little; raise "
            "--host-memory",
            short,
        )
    missing = split.num_layers * split.off_device - slots
    cached = min(max(CACHED_PER_MISSING * missing, LEAST_CACHE_SLOTS), slots)
    most_homes, homes = (slots - LEAST_CACHE_SLOTS) // split.num_layers, (slots - cached) // split.num_layers
    if room.written:
        homes = min(max(split.off_device - room.written, 0), most_homes)
    homes = min(homes, split.off_device - 1)
    on_disk = split.off_device - homes
    return split._replace(on_disk=on_disk, cache_slots=min(slots - homes * split.num_layers, split.num_layers * on_disk))


def _checked(plan: DevicePlan, room: RoomBelow) -> DevicePlan:
    short = plan.disk_bytes - room.disk
    if short > 0:
        raise DoesNotFit(
            f"{format_bytes(plan.disk_bytes)} of experts fit neither the device nor host memory, and the disk has room for "
            f"{format_bytes(room.disk)}: {format_bytes(short)} short; free disk space, name another --disk-folder, or raise --host-memory",
            short,
        )
    return plan


def _no_disk(plan: DevicePlan, room: RoomBelow) -> DoesNotFit:
    short = plan.host_bytes - room.host
    return DoesNotFit(
        f"{format_bytes(plan.host_bytes)} of weights do not fit the device, and {format_bytes(max(room.host, 0))} of host memory are free for them: "
        f"{format_bytes(short)} short; raise --host-memory or --gpu-memory, use fewer bits (--quant int4), or run from disk with --device cpu",
        short,
    )
