"""What a running engine reports of its tiers."""

from __future__ import annotations

from collections.abc import Iterable

from windlass.core.model import Frozen


class TierStats(Frozen):
    """Counters since the model was loaded."""

    device_bytes: int = 0
    """Weights in device memory."""
    host_bytes: int = 0
    """Weights and buffers in host memory."""
    disk_bytes: int = 0
    """Weights whose home is the disk."""
    expert_slots: int = 0
    """Experts that memory has room for; 0: all are in memory."""
    num_experts: int = 0
    """Experts on disk."""
    expert_hits: int = 0
    """Experts that a step needed and found in memory."""
    expert_misses: int = 0
    expert_reads: int = 0
    """Beside a device with a disk below: of the misses, those that were read from disk. The others were in host memory."""
    expert_foreseen: int = 0
    """Of the misses: those that were being read before they were chosen."""
    expert_guesses: int = 0
    """Beside a GPU: experts in host memory that a layer was expected to choose."""
    expert_guessed_right: int = 0
    wasted_bytes: int = 0
    """Fetched by the device for wrong guesses."""
    read_bytes: int = 0
    read_seconds: float = 0.0
    """With at least one read in flight."""

    @property
    def hit_rate(self) -> float | None:
        needed = self.expert_hits + self.expert_misses
        return self.expert_hits / needed if needed else None

    @property
    def read_bytes_per_second(self) -> float | None:
        return self.read_bytes / self.read_seconds if self.read_seconds else None


def total_tiers(each: Iterable[TierStats | None]) -> TierStats | None:
    """Sums over ranks, or over the models of a server; None: nothing is offloaded anywhere."""
    found = [one for one in each if one is not None]
    sums = {name: sum(getattr(one, name) for one in found) for name in TierStats.__struct_fields__}
    return TierStats(**sums) if found else None
