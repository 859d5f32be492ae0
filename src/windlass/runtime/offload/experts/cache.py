"""Which expert lies in which slot of memory, and which makes room for another. Numbers only: knows no memory and no disk.

The slots are shared by all layers. An expert's worth is its number of uses, each counting half as much as one `half_life` steps later
(an exponentially decayed frequency: a half-life near zero is least recently used, an infinite one least frequently used). The worth of
different moments is compared without touching all experts every step: worth * 2^(now / half_life) does not change while an expert is not
used, and its logarithm does not overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HALF_LIFE = 16.0
"""Steps. Measured in bench/offload/policies.py; docs/reference/offload.md has the table."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Fetched:
    """Of the experts asked for, in their order."""

    slots: Ints
    missing: NDArray[np.bool_]
    """Whether the slot has to be filled."""


@dataclass
class CacheCounts:
    hits: int = 0
    misses: int = 0
    foreseen: int = 0
    """Of the misses: those whose read began before their layer asked for them."""


class ExpertCache:
    def __init__(self, num_layers: int, num_experts: int, num_slots: int, half_life: float = HALF_LIFE) -> None:
        self._half_life, self._num_experts = half_life, num_experts
        self._slot_of = np.full(num_layers * num_experts, -1, dtype=np.int64)
        self._owner = np.full(num_slots, -1, dtype=np.int64)
        self._worth = np.full(num_layers * num_experts, -np.inf)
        """log2 of the decayed number of uses, times 2^(now / half_life)."""
        self._step, self._last_layer = 0, -1
        self.counts = CacheCounts()

    @property
    def num_slots(self) -> int:
        return len(self._owner)

    def fetch(self, layer: int, experts: Ints, keep: Ints | None = None, num_foreseen: int = 0) -> Fetched:
        """Slots for these experts of a layer, each once, at most as many as there are slots. `keep`: slots that are in use besides.
        `num_foreseen`: so many of them have a slot by `reserve`, and are counted as missing."""
        self._count_step(layer)
        keys = layer * self._num_experts + experts
        self._use(keys)
        fetched = self._placed(keys, keep)
        num_missing = int(fetched.missing.sum()) + num_foreseen
        self.counts.hits += len(keys) - num_missing
        self.counts.misses += num_missing
        self.counts.foreseen += num_foreseen
        return fetched

    def reserve(self, layer: int, experts: Ints, keep: Ints) -> Fetched:
        """The same for experts that nothing has asked for yet: it counts as no use."""
        return self._placed(layer * self._num_experts + experts, keep)

    def forget(self, layer: int, experts: Ints) -> None:
        """Their slots were not filled after all."""
        slots = self._slot_of[layer * self._num_experts + experts]
        self._slot_of[layer * self._num_experts + experts] = -1
        self._owner[slots[slots >= 0]] = -1

    def _count_step(self, layer: int) -> None:
        if layer < self._last_layer:
            self._step += 1
        self._last_layer = layer

    def _use(self, keys: Ints) -> None:
        self._worth[keys] = np.logaddexp2(self._worth[keys], self._step / self._half_life)

    def _placed(self, keys: Ints, keep: Ints | None) -> Fetched:
        slots = self._slot_of[keys]
        missing = slots < 0
        if missing.any():
            slots[missing] = self._make_room(int(missing.sum()), slots[~missing], keep)
            self._slot_of[keys[missing]] = slots[missing]
            self._owner[slots[missing]] = keys[missing]
        return Fetched(slots, missing)

    def _make_room(self, count: int, used: Ints, keep: Ints | None) -> Ints:
        """The emptiest slots: free ones, then those whose expert is worth least."""
        worth = np.where(self._owner < 0, -np.inf, self._worth[self._owner])
        worth[used] = np.inf
        if keep is not None:
            worth[keep] = np.inf
        chosen = np.argpartition(worth, count - 1)[:count] if count < len(worth) else np.arange(len(worth))
        assert not np.isposinf(worth[chosen]).any(), "more experts than slots"
        former = self._owner[chosen]
        self._slot_of[former[former >= 0]] = -1
        return chosen.astype(np.int64)
