"""Reads of experts that a layer will probably choose, begun before it has chosen.

The router of a layer, applied to what enters the feed-forward of the layer before, finds most of its experts (82 % of tiny-glm's;
docs/reference/offload.md): the disk has something to do while attention and other experts are computed. A wrong guess costs a read and a slot,
never a result. Knows no file and no computation. Called by the thread that computes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from windlass.runtime.offload.experts.cache import ExpertCache, Ints
from windlass.runtime.offload.tiers.reader import Read


@dataclass(frozen=True)
class ComingExpert:
    layer: int
    expert: int
    slot: int
    read: Read


class ReadsAhead:
    """What is on its way, until its layer takes it; and what turned out not to be needed, until nothing writes to its slot any more."""

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        self._coming: dict[tuple[int, int], ComingExpert] = {}
        self._unneeded: list[ComingExpert] = []

    @property
    def slots(self) -> Ints:
        """That must not be given to another expert."""
        return np.array([one.slot for one in (*self._coming.values(), *self._unneeded)], dtype=np.int64)

    def add(self, coming: ComingExpert) -> None:
        self._coming[coming.layer, coming.expert] = coming

    def take(self, layer: int, chosen: Collection[int]) -> dict[int, Read]:
        """The reads of those that the layer has chosen, by expert. Its others are dropped."""
        found: dict[int, Read] = {}
        for key, coming in list(self._coming.items()):
            if coming.layer == layer:
                del self._coming[key]
                if coming.expert in chosen:
                    coming.read.hurry()
                    found[coming.expert] = coming.read
                else:
                    coming.read.cancel()
                    self._unneeded.append(coming)
        for one in self._unneeded:
            if one.layer == layer and one.expert in chosen:  # needed after all: the cache takes it for present
                one.read.settle()
        self._sweep()
        return found

    def _sweep(self) -> None:
        """One that was read to its end stays in the cache."""
        left: list[ComingExpert] = []
        for one in self._unneeded:
            if not one.read.done():
                left.append(one)
            elif not one.read.settle():
                self._cache.forget(one.layer, np.array([one.expert], dtype=np.int64))
        self._unneeded = left
