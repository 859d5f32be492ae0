"""Placement over tiers: which unit lives where, and how many experts are kept in memory. A pure function of bytes, reads and speeds.

Units are read once per step, in a known order: those outside of the first tier stream through a ring of buffers while others compute. Which
experts a step reads is known only after routing, so loading them is waited for. A placement is a set of units that stream; experts get the
room that is left. Sets are tried from none to all, spread evenly over the layers so that the disk is never idle; the best is then improved
by moving single units, until no move makes the predicted step faster.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from windlass.core.tiers.exchange import EXCHANGE_SECONDS, HostReads, waiting_seconds
from windlass.core.tiers.misses import Misses
from windlass.core.tiers.values import Demand, Room, Speeds, TierPlacement, Unit, in_blocks
from windlass.errors import DoesNotFit
from windlass.units import format_bytes

NEARLY = 1.15
RING_UNITS = 2
"""Buffers of the largest streamed unit: one computes while the next is loaded."""
STAGED_LAYERS, SPARE_SLOTS = 2, 2
"""Beside a device: slots for experts in host memory, for as many layers (one computes while the next is copied), and for experts that move."""


@dataclass(frozen=True)
class Split:
    """A set of streamed units, with all that follows from it."""

    streamed: frozenset[int]
    """Indices of the units outside of the first tier."""
    in_host: frozenset[int]
    """Of these, with a device: those whose home is host memory."""
    ring_bytes: int
    first_slots: int
    host_slots: int
    """With a device only."""
    short_bytes: int
    """Bytes missing; 0: it fits."""
    seconds: float


def place_tiers(demand: Demand, room: Room, speeds: Speeds, written: Collection[str] = ()) -> TierPlacement:
    """The fastest placement found. Raises DoesNotFit where there is none.

    `written`: units that an earlier run has put on disk. They stream again if that is nearly as fast, since writing others takes long, and
    measured speeds are never twice the same.
    """
    placer = _Placer(demand, room, speeds)
    best = placer.best()
    if best.short_bytes:
        raise _too_small(demand, room, best.short_bytes)
    again = placer.split(frozenset(index for index, unit in enumerate(demand.units) if unit.name in written))
    is_near = not again.short_bytes and again.seconds <= best.seconds * NEARLY
    return placer.placement(again if written and is_near else best)


def predicted_seconds(demand: Demand, placed: TierPlacement, speeds: Speeds, *, guesses: bool = True) -> float:
    """Of one decode step: what is loaded in a known order overlaps with computing, missing experts are waited for; beside a device less long with
    `guesses`.

    Routing is taken to be even, so the share of an expert's reads that find it in a tier is the share of experts there.
    """
    sizes = {unit.name: unit.num_bytes for unit in demand.units}
    in_host, on_disk = (sum(sizes[name] for name in names) for names in (placed.host_units, placed.disk_units))
    slots = placed.device_slots, placed.host_slots, placed.cache_slots
    return _seconds(demand, speeds, in_host, on_disk, placed.ring_bytes, *slots, guesses=guesses)


def _seconds(
    demand: Demand,
    speeds: Speeds,
    in_host: int,
    on_disk: int,
    ring_bytes: int,
    device_slots: int,
    host_slots: int,
    cache_slots: int = 0,
    *,
    guesses: bool = True,
) -> float:
    """While the head and the rest that never streams are computed, reads go on only as far as the ring has room."""
    has_device = speeds.device > 0
    in_device, in_memory, missing = _expert_reads(demand, device_slots, host_slots)
    reads = demand.unit_bytes - in_host + in_device if has_device else demand.unit_bytes + in_memory + missing
    rate = speeds.device if has_device else speeds.host
    computing, fixed = reads / rate, demand.fixed_read_bytes / rate
    streams = [(in_host, speeds.below_device if has_device else 0.0), (on_disk, speeds.disk)]
    streaming = max(
        (num_bytes / speed + max(fixed - ring_bytes / speed, 0.0) for num_bytes, speed in streams if num_bytes), default=0.0
    )
    if has_device:
        cached = in_memory * cache_slots / host_slots if host_slots else 0.0
        waiting = _waiting_below(demand, speeds, computing, in_memory - cached, cached, missing, guesses=guesses)
    else:
        waiting = missing / speeds.disk if missing else 0.0
    return max(computing + fixed, streaming) + waiting


def _waiting_below(
    demand: Demand, speeds: Speeds, device_seconds: float, at_home: float, cached: float, missing: float, *, guesses: bool
) -> float:
    """Of a step beside a device, for bytes of experts in host memory, in its cache of those on disk, and on disk. What is missing is read while the
    rest of its layer is computed. The CPU computes all of what is on disk, cached or not. Only what is in host memory is guessed."""
    if demand.experts is None or not at_home + cached + missing:
        return 0.0
    pool, layers = demand.experts, demand.experts.num_layers
    computing = EXCHANGE_SECONDS
    if at_home:
        reads = HostReads(at_home / layers, speeds.host, speeds.link, pool.blocks, pool.rows)
        computing = waiting_seconds(reads, device_seconds / layers, guesses=guesses)
    if cached:
        computing += cached / layers / speeds.host
    return Misses(missing, pool.expert_bytes, layers).waiting_seconds(computing, speeds.host, speeds.disk)


def _expert_reads(demand: Demand, device_slots: int, host_slots: int) -> tuple[float, float, float]:
    """Bytes of experts that a step reads from device memory, host memory and disk."""
    pool = demand.experts
    if pool is None or not pool.num_experts:
        return 0.0, 0.0, 0.0
    per_expert = pool.touched * pool.expert_bytes
    on_disk = max(pool.num_experts - device_slots - host_slots, 0)
    return device_slots * per_expert, host_slots * per_expert, on_disk * per_expert


def _rank(split: Split) -> tuple[float, ...]:
    return split.short_bytes, split.seconds, len(split.streamed)


class _Placer:
    def __init__(self, demand: Demand, room: Room, speeds: Speeds) -> None:
        self._demand, self._room, self._speeds = demand, room, speeds
        self._sizes = [in_blocks(unit.num_bytes) for unit in demand.units]
        self._all = sum(self._sizes)
        self._has_device = room.device is not None

    def best(self) -> Split:
        """Beside a device, experts move first: units stay on it if they fit."""
        still = self.split(frozenset())
        if self._has_device and self._demand.experts is not None and not still.short_bytes:
            return still
        return self.improved(min((self.split(chosen) for chosen in self.candidates()), key=_rank))

    def candidates(self) -> list[frozenset[int]]:
        """From nothing streamed to everything, each set spread evenly over the order of use."""
        total = len(self._sizes)
        counts = sorted({round(total * step / 64) for step in range(65)} | set(range(min(total, 8) + 1)))
        return [spread(self._demand.units, count) for count in counts]

    def split(self, streamed: frozenset[int]) -> Split:
        demand, room, pool = self._demand, self._room, self._demand.experts
        moved = sum(self._sizes[index] for index in streamed)
        ring = RING_UNITS * max((self._sizes[index] for index in streamed), default=0)
        used = demand.fixed_bytes + self._all - moved + ring
        in_host, host_used = self._host_homes(streamed)
        slots, host_slots = self._slots(room.first - used, room.host - host_used)
        least = self._least_slots(slots) * in_blocks(pool.expert_bytes) if pool else 0
        short = max(used + least - room.first, 0) + self._disk_short(streamed - in_host, slots + host_slots)
        device, host = (slots, host_slots) if self._has_device else (0, slots)
        host_bytes, disk_bytes = self._bytes(in_host), self._bytes(streamed - in_host)
        seconds = _seconds(demand, self._speeds, host_bytes, disk_bytes, ring, device, host)
        return Split(streamed, in_host, ring, slots, host_slots, short, seconds)

    def _least_slots(self, slots: int) -> int:
        """Without which a layer cannot be computed, where not all experts are in the first tier."""
        pool = self._demand.experts
        assert pool is not None
        if not self._has_device:
            return min(pool.least_slots, pool.num_experts)
        if slots == pool.num_experts:
            return slots
        return slots + STAGED_LAYERS * (pool.num_experts - slots) // pool.num_layers + SPARE_SLOTS

    def improved(self, split: Split) -> Split:
        """Single units are moved while that makes it fit better or the step faster."""
        better = True
        while better:
            better = False
            for index in range(len(self._sizes)):
                other = self.split(split.streamed ^ {index})
                if _rank(other) < _rank(split):
                    split, better = other, True
        return split

    def placement(self, split: Split) -> TierPlacement:
        demand, pool = self._demand, self._demand.experts
        on_disk = split.streamed - split.in_host
        num_experts, expert_bytes = (pool.num_experts, in_blocks(pool.expert_bytes)) if pool else (0, 0)
        disk_experts = num_experts if split.first_slots + split.host_slots < num_experts else 0
        first = demand.fixed_bytes + self._all - sum(self._sizes[index] for index in split.streamed)
        first += split.ring_bytes + split.first_slots * expert_bytes
        if pool and self._has_device and split.first_slots < num_experts:
            first += (STAGED_LAYERS * (num_experts - split.first_slots) // pool.num_layers + SPARE_SLOTS) * expert_bytes
        below = sum(self._sizes[index] for index in split.in_host) + split.host_slots * expert_bytes
        return TierPlacement(
            host_units=self._names(split.in_host),
            disk_units=self._names(on_disk),
            ring_bytes=split.ring_bytes,
            num_experts=num_experts,
            expert_bytes=expert_bytes,
            device_slots=split.first_slots if self._has_device else 0,
            host_slots=split.host_slots if self._has_device else split.first_slots,
            disk_experts=disk_experts,
            cpu_share=self._speeds.cpu_share if self._has_device else 0.0,
            device_bytes=first if self._has_device else 0,
            host_bytes=below if self._has_device else first,
            disk_bytes=sum(self._sizes[index] for index in on_disk) + disk_experts * expert_bytes,
            step_seconds=split.seconds,
        )

    def _host_homes(self, streamed: frozenset[int]) -> tuple[frozenset[int], int]:
        """With a device: streamed units live in host memory while there is room. They are read every step, experts are not."""
        found: set[int] = set()
        used = 0
        for index in sorted(streamed) if self._has_device else ():
            if used + self._sizes[index] <= self._room.host:
                found.add(index)
                used += self._sizes[index]
        return frozenset(found), used

    def _slots(self, first_bytes: int, host_bytes: int) -> tuple[int, int]:
        pool = self._demand.experts
        if pool is None or not pool.num_experts:
            return 0, 0
        size = in_blocks(pool.expert_bytes)
        first = min(max(first_bytes, 0) // size, pool.num_experts)
        if self._has_device and first < pool.num_experts:
            each = pool.num_experts // pool.num_layers
            first = max(experts_on_device(max(first_bytes, 0), pool.num_layers, each, size), 0) * pool.num_layers
        return first, min(max(host_bytes, 0) // size, pool.num_experts - first) if self._has_device else 0

    def _disk_short(self, on_disk: frozenset[int], slots: int) -> int:
        pool = self._demand.experts
        experts = pool.num_experts * in_blocks(pool.expert_bytes) if pool and slots < pool.num_experts else 0
        return max(sum(self._sizes[index] for index in on_disk) + experts - self._room.disk, 0)

    def _bytes(self, units: frozenset[int]) -> int:
        return sum(self._demand.units[index].num_bytes for index in units)

    def _names(self, units: frozenset[int]) -> tuple[str, ...]:
        return tuple(self._demand.units[index].name for index in sorted(units))


def experts_on_device(room: int, num_layers: int, num_experts: int, expert_bytes: int) -> int:
    """Of each layer's `num_experts`, beside staging slots for the others; negative: not even these fit."""
    slots = room // expert_bytes - SPARE_SLOTS
    if slots < STAGED_LAYERS * num_experts:
        return -1
    return min(num_experts, (slots - STAGED_LAYERS * num_experts) // max(num_layers - STAGED_LAYERS, 1))


def spread(units: Sequence[Unit], count: int) -> frozenset[int]:
    """`count` of the units, as evenly over their order as can be."""
    return spread_numbers(len(units), count)


def spread_numbers(total: int, count: int) -> frozenset[int]:
    """`count` of the numbers below `total`, evenly."""
    return frozenset(index for index in range(total) if (index + 1) * count // total > index * count // total)


def _too_small(demand: Demand, room: Room, short_bytes: int) -> DoesNotFit:
    tiers = [("device memory", room.device), ("host memory", room.host), ("disk", room.disk)]
    have = ", ".join(f"{format_bytes(size)} of {name}" for name, size in tiers if size is not None)
    return DoesNotFit(
        f"the weights need {format_bytes(demand.total_bytes)}, and with {have} left for them {format_bytes(short_bytes)} are missing; "
        "raise --host-memory, free disk space, or use fewer bits (--quant int4)",
        short_bytes,
    )
