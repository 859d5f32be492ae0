"""Experts on disk on their way to the device in steps of many rows: read layer after layer into a ring of pinned blocks, ahead of use, and copied.

What the cache has is copied from there, and held until that is done. The thread that launches kernels does all of it; threads of the reader read.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.runtime.offload.device.disk import DiskBelow
from windlass.runtime.offload.tiers.memory import view
from windlass.runtime.offload.tiers.reader import Read


class _Coming(NamedTuple):
    layer: int
    expert: int
    block: int
    """Of the ring."""
    read: Read


class _Copied(NamedTuple):
    """Memory that is free once the device has passed the event; None: at once."""

    event: torch.cuda.Event | None
    block: int | None
    slots: list[int]

    def is_over(self) -> bool:
        return self.event is None or self.event.query()


class LayerReads:
    """One step at a time; layers in order, from 0 on."""

    def __init__(self, disk: DiskBelow, num_layers: int) -> None:
        self._disk, self._num_layers = disk, num_layers
        self._is_cuda = False
        self._wanted: deque[tuple[int, int]] = deque()
        """Layer and expert: to be read."""
        self._next_layer = 0
        self._held: dict[int, list[int]] = {}
        """By layer: slots of its experts in the cache, or -1."""
        self._coming: deque[_Coming] = deque()
        self._copied: deque[_Copied] = deque()
        self._free = list(range(disk.ring.shape[0]))

    def start(self) -> None:
        self._next_layer = 0
        self._begin_more()

    def copy(self, layer: int, gate_up: Tensor, down: Tensor) -> None:
        """To the layer's slots on the device, [experts on disk, ...] each. Returns when all copies are begun on the current stream."""
        self._is_cuda = gate_up.is_cuda
        self._begin_more()
        if layer not in self._held:  # no block was free
            self._look_at_next()
        cached = [(expert, slot) for expert, slot in enumerate(self._held.pop(layer)) if slot >= 0]
        for expert, slot in cached:
            self._put(self._disk.slots[slot], gate_up[expert], down[expert])
        if cached:
            self._copied.append(_Copied(self._marked(), None, [slot for _, slot in cached]))
        while self._next_is_of(layer):
            if not self._coming:  # all blocks are being copied
                self._settle_one()
                self._begin_more()
                continue
            one = self._coming[0]
            one.read.wait()  # which may raise: it is still among those that come
            self._coming.popleft()
            self._put(self._disk.ring[one.block], gate_up[one.expert], down[one.expert])
            self._copied.append(_Copied(self._marked(), one.block, []))
            self._begin_more()

    def abandon(self) -> None:
        """After a step that did not come to its end: nothing is read or held any more."""
        for one in self._coming:
            one.read.cancel()
        for one in self._coming:
            one.read.settle()
            self._free.append(one.block)
        for slots in self._held.values():
            self._disk.cache.let_go([slot for slot in slots if slot >= 0])
        self._wanted.clear()
        self._coming.clear()
        self._held.clear()
        self._next_layer = self._num_layers
        self.settle()

    def sweep(self) -> None:
        """Gives back what was copied meanwhile."""
        while self._copied and self._copied[0].is_over():
            self._settle_one()

    def settle(self) -> None:
        """Waits for the copies that are under way."""
        while self._copied:
            self._settle_one()

    def _next_is_of(self, layer: int) -> bool:
        if self._coming:
            return self._coming[0].layer == layer
        return bool(self._wanted) and self._wanted[0][0] == layer

    def _begin_more(self) -> None:
        """As many reads as there are free blocks."""
        self.sweep()
        while self._free and (self._wanted or self._look_at_next()):
            layer, expert = self._wanted.popleft()
            block = self._free.pop()
            offset = self._disk.offsets[layer] + expert * self._disk.block_bytes
            self._coming.append(_Coming(layer, expert, block, self._disk.reader.read(offset, view(self._disk.ring[block]))))

    def _look_at_next(self) -> bool:
        """Which experts of the next layer have to be read; whether there was one, all of whose experts may be in the cache."""
        while self._next_layer < self._num_layers and not self._wanted:
            layer, self._next_layer = self._next_layer, self._next_layer + 1
            held = self._held[layer] = self._disk.cache.hold(layer)
            self._wanted.extend((layer, expert) for expert, slot in enumerate(held) if slot < 0)
        return bool(self._wanted)

    def _put(self, block: Tensor, gate_up: Tensor, down: Tensor) -> None:
        for source, to in zip(self._disk.expert_in(block), (gate_up, down), strict=True):
            to.copy_(source, non_blocking=True)

    def _marked(self) -> torch.cuda.Event | None:
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _settle_one(self) -> None:
        one = self._copied.popleft()
        if one.event is not None:
            one.event.synchronize()
        if one.block is not None:
            self._free.append(one.block)
        if one.slots:
            self._disk.cache.let_go(one.slots)
