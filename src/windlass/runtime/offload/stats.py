"""A running disk tier: its numbers, and its end."""

from __future__ import annotations

import weakref

from windlass.core.tiers.stats import TierStats
from windlass.core.tiers.values import Speeds, TierPlacement
from windlass.runtime.offload.experts.experts import ExpertSlots
from windlass.runtime.offload.stream.stream import MatrixStream
from windlass.runtime.offload.tiers.file import OpenedTier
from windlass.runtime.offload.tiers.reader import DirectReader, sequential_speed


class DiskTier:
    """The reads end with it."""

    def __init__(
        self,
        placed: TierPlacement,
        tier: OpenedTier,
        reader: DirectReader,
        stream: MatrixStream | None,
        slots: ExpertSlots | None,
    ) -> None:
        self.placed, self.tier, self.stream = placed, tier, stream
        self._reader, self._slots = reader, slots
        self._close = weakref.finalize(self, reader.close)

    def stats(self) -> TierStats:
        counts, placed = self._reader.counts, self.placed
        cache = None if self._slots is None else self._slots.cache
        return TierStats(
            host_bytes=placed.host_bytes,
            disk_bytes=placed.disk_bytes,
            expert_slots=placed.host_slots if placed.disk_experts else 0,
            num_experts=placed.disk_experts,
            expert_hits=0 if cache is None else cache.counts.hits,
            expert_misses=0 if cache is None else cache.counts.misses,
            expert_foreseen=0 if cache is None else cache.counts.foreseen,
            read_bytes=counts.num_bytes,
            read_seconds=counts.busy_seconds,
        )

    def measure(self, seconds: float = 1.0) -> Speeds:
        """What the same file gives to the same reader, with nothing else to do. Not while a step runs."""
        return Speeds(host=0.0, disk=sequential_speed(self._reader, self.tier.num_bytes, seconds))

    def close(self) -> None:
        self._close()
