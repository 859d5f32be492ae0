"""What a layer waits for where some of its experts lie in host memory beside a device. Pure; planner and engine share it.

The device asks the CPU for its part of these experts, fetches the other part over the link, and adds both to its own. Link and CPU begin when
the router has chosen, and the layer ends with the slower of them. With guesses (core/tiers/guesses.py) both read before that. Where the
numbers are from: docs/reference/plan.md, "Beside a device".
"""

from __future__ import annotations

from typing import NamedTuple

from windlass.core.tiers.guesses import CARRIED_BYTES, GUESS_ROWS, GUESSED_RIGHT

EXCHANGE_SECONDS = 60e-6
"""Of a layer: routing is published, the CPU's threads meet, its answer is added (docs/reference/cuda-notes.md, 28)."""
GUESS_SECONDS = 20e-6
"""The same of guessing: between the CPU's answers there were 76 us with guesses and 50 without, of which 7 are in the kernel that publishes
(GLM-4.5-Air beside an H200)."""
PACKED_SPEED = 90e9
"""Bytes a second of CPU kernels that multiply an expert with several rows: 16 cores with AMX (docs/reference/cuda-notes.md, 28)."""
FETCHED = 0.9
"""Of what copies carry over a link: 48 to 50 GB/s by a kernel that fetches experts beside the CPU's reads, 53 to 55 by copies (the same)."""
CACHED_SPEED = 180e9
"""The same with one row where weights are in second-level caches: 160 and 205 measured with 15 threads, two models."""
CACHED_BYTES = 15e6
"""Of a guess: half of the second-level caches of 15 cores with 2 MiB each (runtime/offload/device/share.py)."""


class HostReads(NamedTuple):
    """What a layer reads of host memory in a step: whole experts, each cut at the same block of its intermediate outputs."""

    num_bytes: float
    host: float
    """Bytes per second of the CPU's kernels, beside the link."""
    link: float
    blocks: int = 0
    """Of an expert's intermediate outputs. 0: it can be cut anywhere."""
    rows: float = 0.0
    """Of the step. 0: nothing is chosen."""

    @property
    def share(self) -> float:
        """That the CPU computes."""
        exact = self.host / (self.host + self.link)
        return cpu_blocks(exact, self.blocks) / self.blocks if self.blocks else exact

    @property
    def cpu_speed(self) -> float:
        return min(self.host, PACKED_SPEED) if self.rows > 1 and self.blocks else self.host

    @property
    def cpu_seconds(self) -> float:
        return self.share * self.num_bytes / self.cpu_speed if self.share else 0.0

    @property
    def link_seconds(self) -> float:
        return (1 - self.share) * self.num_bytes / self.link if self.share < 1 else 0.0


def cpu_blocks(share: float, blocks: int) -> int:
    """Of an expert, where the CPU is to compute about this share of it."""
    return min(blocks, round(share * blocks))


def waiting_seconds(reads: HostReads, computing: float, *, guesses: bool = True) -> float:
    """Of a layer, beside the `computing` seconds of its device."""
    if not (guesses and 0 < reads.rows <= GUESS_ROWS):
        return EXCHANGE_SECONDS + max(reads.cpu_seconds, reads.link_seconds)
    exchange = EXCHANGE_SECONDS + GUESS_SECONDS
    idle = computing + exchange
    # The link goes on from layer to layer: it may be busy all the time, but no longer.
    link = max(reads.link_seconds * (1 - _foreseen(reads)), reads.link_seconds - idle)
    return exchange + max(reads.cpu_seconds - _saved_by_caches(reads, idle), link)


def _foreseen(reads: HostReads) -> float:
    """Of what the link carries. Steps of several rows guess no more than it carries while the device computes."""
    carried = (1 - reads.share) * reads.num_bytes
    return GUESSED_RIGHT if reads.rows <= 1 else min(GUESSED_RIGHT, CARRIED_BYTES / max(carried, 1.0))


def _saved_by_caches(reads: HostReads, idle: float) -> float:
    """Of the CPU's seconds: it has read as much as its caches hold, and multiplies that quicker than memory would give it."""
    ahead = min(CACHED_BYTES, reads.host * idle, reads.share * reads.num_bytes)
    return GUESSED_RIGHT * ahead * max(1 / reads.cpu_speed - 1 / CACHED_SPEED, 0.0) if ahead else 0.0
