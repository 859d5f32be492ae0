"""What a rank has to place, where there is room for it, how fast each place is, and the result. Values only.

A *unit* is what moves as a whole and is read once per step: a matrix of a layer, stacked as its product needs it. Routed experts move one by
one, and a step reads only some of them. The *first* tier is the memory that the rank computes from: the device's, or host memory on a CPU.
"""

from __future__ import annotations

from windlass.core.model import Frozen

BLOCK_BYTES = 4096
"""Reads that bypass the page cache start and end on multiples of this (the logical block size of every common disk divides it)."""


def in_blocks(num_bytes: int) -> int:
    """Rounded up to whole blocks."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


class Unit(Frozen):
    name: str
    """`layers.3.mixer.q+k+v`."""
    num_bytes: int


class ExpertPool(Frozen):
    """The routed experts of a rank, over all its layers."""

    num_experts: int
    expert_bytes: int
    """Of one expert: gate, up and down, one after another. The largest, if layers differ."""
    touched: float
    """Share of them that a step is expected to read."""
    num_layers: int = 1
    """That they belong to, evenly."""
    rows: float = 0.0
    """Of a step: sequences at once. 0: not experts that are chosen, but slices that every step reads."""
    blocks: int = 0
    """Of the intermediate outputs of one: where it may be cut between a device and the CPU. 0: anywhere."""
    least_slots: int = 2
    """Slots without which a layer cannot be computed: one that computes, one that is being filled."""


class Demand(Frozen):
    fixed_bytes: int = 0
    """What stays in the first tier: norms, routers, embedding, head, biases."""
    fixed_read_bytes: int = 0
    """Of these, what a step reads (of an embedding, next to nothing)."""
    units: tuple[Unit, ...] = ()
    """In the order of use."""
    experts: ExpertPool | None = None

    @property
    def unit_bytes(self) -> int:
        return sum(unit.num_bytes for unit in self.units)

    @property
    def total_bytes(self) -> int:
        experts = self.experts
        return self.fixed_bytes + self.unit_bytes + (experts.num_experts * experts.expert_bytes if experts else 0)


class Room(Frozen):
    """Bytes for the weights of one rank. `device` None: the rank runs on the CPU, and host memory is its first tier."""

    host: int
    disk: int = 0
    device: int | None = None

    @property
    def first(self) -> int:
        return self.host if self.device is None else self.device


class Speeds(Frozen):
    """Bytes per second, as measured."""

    host: float
    """CPU kernels, reading host memory; on a machine with a GPU, while copies run beside them."""
    disk: float
    """Direct reads at high queue depth."""
    device: float = 0.0
    """Device memory."""
    link: float = 0.0
    """Host memory to device."""

    @property
    def cpu_share(self) -> float:
        """Of what lies in host memory beside a device: the share that the CPU computes where it lies, so that both end together."""
        return self.host / (self.host + self.link) if self.link else 1.0

    @property
    def below_device(self) -> float:
        """Bytes per second of what lies in host memory beside a device: some travel, some are computed on the CPU."""
        return self.host + self.link


class TierPlacement(Frozen):
    """Where everything is. A unit has one home. On a CPU experts that do not all fit in memory have their home on the disk, and memory is a cache;
    beside a device each expert has its home on the device, in host memory or on the disk."""

    host_units: tuple[str, ...] = ()
    """With a device: units whose home is host memory. Without one, host memory is the first tier, and they are not listed."""
    disk_units: tuple[str, ...] = ()
    ring_bytes: int = 0
    """Buffers in the first tier that units of other tiers pass through."""
    num_experts: int = 0
    expert_bytes: int = 0
    device_slots: int = 0
    """Experts in device memory."""
    host_slots: int = 0
    """Experts in host memory."""
    cache_slots: int = 0
    """With a device: of these, room for experts whose home is the disk, whichever are used."""
    disk_experts: int = 0
    """Experts whose home is the disk: without a device all or none."""
    cpu_share: float = 0.0
    """Of what lies in host memory beside a device: the share that the CPU computes."""
    device_bytes: int = 0
    """Weights and buffers in device memory."""
    host_bytes: int = 0
    disk_bytes: int = 0
    step_seconds: float = 0.0
    """Predicted, for one decode step."""

    @property
    def moves(self) -> bool:
        """Whether anything lives outside of the first tier."""
        return bool(self.host_units or self.disk_units or self.disk_experts or (self.device_bytes and self.host_slots))

    @property
    def uses_disk(self) -> bool:
        return bool(self.disk_bytes)
