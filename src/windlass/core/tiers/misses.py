"""What a step waits for where experts are on disk below host memory, beside a device. Pure; the engine predicts and measures by it.

A layer asks the disk for all experts that it misses at once, and the CPU's threads compute them as they come. Nothing else is read meanwhile: the
disk gets its work in bursts, begins each from nothing, and is idle until the next layer has chosen. How fast it is then is measured with such bursts
(runtime/offload/tiers/reader.py). A layer that misses nothing does not wait. Routing is taken to be even, so that misses fall on layers by chance.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

from windlass.core.tiers.exchange import EXCHANGE_SECONDS

IN_BURSTS = 0.73
"""Of what a disk gives in order: 2.26 of 3.09 GB/s, with two or three experts of 8.9 MB a layer (an H200's machine, docs/reference/offload.md). For
plans: the engine measures bursts."""
PASS_SECONDS = 1e-3
"""Of computing an expert after the disk was waited for, beside reading its weights: threads slept, and share their cores with those that read.
Weights of 8.9 MB took 1.1 ms with one row (8 GB/s while the CPU was busy) and 0.9 with eight; reading them takes 0.1 (15 threads of 16 cores)."""


class Misses(NamedTuple):
    """Of a decode step."""

    num_bytes: float
    expert_bytes: float
    num_layers: float

    @property
    def _per_layer(self) -> float:
        return self.num_bytes / self.expert_bytes / self.num_layers

    @property
    def layers(self) -> float:
        """That miss something."""
        return self.num_layers * (1 - exp(-self._per_layer))

    @property
    def burst(self) -> int:
        """Experts that such a layer asks for at once."""
        return max(1, round(self._per_layer * self.num_layers / self.layers)) if self.num_bytes else 1

    def waiting_seconds(self, computing: float, host: float, disk: float) -> float:
        """Of all layers. `computing`: what each takes without misses, of which those that come from disk hide behind the reads."""
        if not self.num_bytes:
            return self.num_layers * computing
        reading = self.num_bytes / disk / self.layers
        missed = max(computing, EXCHANGE_SECONDS + reading + PASS_SECONDS + self.expert_bytes / host)
        return (self.num_layers - self.layers) * computing + self.layers * missed
