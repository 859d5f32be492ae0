"""How fast the link and the CPU's kernels are while both run: what decides how much of an expert the CPU computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from windlass.core.tiers.values import Speeds
from windlass.runtime.kernels.cuda import layout
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.cuda.tiered import (
    FETCHED,
    ITEM_BYTES,
    ITEMS_AT,
    STATE_WORDS,
    ExpertSlots,
    TieredTiles,
    mailbox_bytes,
)
from windlass.runtime.offload.device.pinned import PinnedMemory
from windlass.runtime.offload.device.share import CpuShare, ShareCounts, library
from windlass.units import MIB

SCRATCH_BYTES = 1024 * MIB
"""More than the caches of a CPU hold."""
DEVICE_BYTES, COPIES = 256 * MIB, 16
SECONDS, ROUNDS = 0.1, 5
"""Of the rounds the best counts: what another process or the hypervisor takes away for a moment would be missing in every step from then on, as the
CPU's part is chosen once. One round of 0.3 s found 16 GB/s where the CPU had 62 in the steps after it."""
EXPERTS = 3
"""Of a question: about as many as a step of one row finds missing in a layer."""


def measured_speeds(gate_up: Tiles, down: Tiles, *, by_copies: bool = False) -> Speeds:
    """`gate_up`, `down`: of some experts, for their shape. Without a compiler the CPU does not take part: its speed is 0.

    `by_copies`: the copy engine moves them, not a kernel.
    """
    sizes = [tiles.data[0].numel() for tiles in (gate_up, down)]
    count = max(EXPERTS, SCRATCH_BYTES // sum(sizes))
    pinned = PinnedMemory(gate_up.data.device)
    try:
        parts = pinned.piece(count * sum(sizes)).split([count * size for size in sizes])
        host = [part.view(count, *tiles.data.shape[1:]) for part, tiles in zip(parts, (gate_up, down), strict=True)]
        mailbox = pinned.piece(mailbox_bytes(gate_up.inputs))
        fetching = _fetching(gate_up, down, host, mailbox)
        fetched = _copied if by_copies else _fetched
        if library() is None:
            return Speeds(host=0.0, disk=0.0, device=_device_speed(fetching), link=fetched(fetching))
        share = CpuShare([host[0]], [host[1]], gate_up, mailbox, down.tile_blocks)
        asking = _Asking(share, mailbox, count)
        asking.start()
        try:
            link, cpu = best_of(lambda: fetched(fetching), lambda: share.counts)
        finally:
            asking.finish()
            share.close()
        return Speeds(host=cpu, disk=0.0, device=_device_speed(fetching), link=link)
    finally:
        torch.cuda.synchronize()
        pinned.close()


def best_of(link: Callable[[], float], counts: Callable[[], ShareCounts]) -> tuple[float, float]:
    """Bytes per second over the link and by the CPU beside it, each from its best round."""
    links, cpus, before = list[float](), list[float](), counts()
    for _ in range(ROUNDS):
        links.append(link())
        after = counts()
        busy = after.busy_seconds - before.busy_seconds
        cpus.append((after.num_bytes - before.num_bytes) / busy if busy else 0.0)
        before = after
    return max(links), max(cpus)


def _fetching(gate_up: Tiles, down: Tiles, host: list[Tensor], mailbox: Tensor) -> TieredTiles:
    """Experts of one layer, all of them in host memory, of which every step needs a few."""
    device = gate_up.data.device
    slots = ExpertSlots(
        *(layout.empty(EXPERTS, t.rows, t.inputs, t.group, paired=t.paired, device=device) for t in (gate_up, down)), staging=0
    )
    state = torch.zeros(STATE_WORDS + EXPERTS, dtype=torch.int32, device=device)
    state[FETCHED] = EXPERTS
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    return TieredTiles(0, slots, nothing, nothing, nothing, nothing, host[0], host[1], state, mailbox, 0, None, 0)


def _fetched(tiles: TieredTiles) -> float:
    """Bytes per second over the link."""
    tiles.fetch()  # compiles the kernel
    torch.cuda.synchronize()
    count, num_bytes, began = tiles.host_gate_up.shape[0], 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        for first in range(0, count - EXPERTS + 1, EXPERTS):
            places = torch.arange(first, first + EXPERTS, dtype=torch.int32, device=tiles.state.device)
            tiles.state[STATE_WORDS:].copy_(places)
            tiles.fetch()
            num_bytes += EXPERTS * (tiles.host_gate_up[0].numel() + tiles.host_down[0].numel())
        torch.cuda.synchronize()
    return num_bytes / (time.perf_counter() - began)


def _copied(tiles: TieredTiles) -> float:
    """The same by copies."""
    host, to = tiles.host_gate_up, tiles.slots.gate_up.data
    num_bytes, began = 0, time.perf_counter()
    while time.perf_counter() - began < SECONDS:
        for first in range(0, host.shape[0] - EXPERTS + 1, EXPERTS):
            to.copy_(host[first : first + EXPERTS], non_blocking=True)
            num_bytes += to.numel()
        torch.cuda.synchronize()
    return num_bytes / (time.perf_counter() - began)


def _device_speed(tiles: TieredTiles) -> float:
    """Bytes per second of device memory, by copying within it."""
    source = torch.empty(DEVICE_BYTES, dtype=torch.uint8, device=tiles.state.device)
    out = torch.empty_like(source)
    out.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(COPIES):
        out.copy_(source)
    torch.cuda.synchronize()
    return 2 * COPIES * DEVICE_BYTES / (time.perf_counter() - began)


class _Asking(threading.Thread):
    """Asks the CPU for one row of some experts after another."""

    def __init__(self, share: CpuShare, mailbox: Tensor, num_experts: int) -> None:
        super().__init__(daemon=True)
        self._share, self._mailbox, self._num_experts, self._is_over = share, mailbox, num_experts, False

    def run(self) -> None:
        self._mailbox[4:16].view(torch.int32).copy_(torch.tensor([1, EXPERTS, 0], dtype=torch.int32))
        items = self._mailbox[ITEMS_AT : ITEMS_AT + EXPERTS * ITEM_BYTES].view(torch.int32).view(EXPERTS, -1)
        items[:, 1:3] = torch.tensor([1, 0], dtype=torch.int32)
        expert = 0
        while not self._is_over:
            items[:, 0] = torch.arange(expert, expert + EXPERTS, dtype=torch.int32) % self._num_experts
            self._share.ask()
            expert += EXPERTS

    def finish(self) -> None:
        self._is_over = True
        self.join()
