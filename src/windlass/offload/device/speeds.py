"""How fast the link and the CPU's kernels are while both run: what decides how much of an expert the CPU computes."""

from __future__ import annotations

import threading
import time

import torch
from torch import Tensor

from windlass.core.tiers.values import Speeds
from windlass.kernels.cuda.layout import Tiles
from windlass.kernels.cuda.tiered import ITEM_BYTES, ITEMS_AT, mailbox_bytes
from windlass.offload.device.pinned import PinnedMemory
from windlass.offload.device.share import CpuShare, library
from windlass.units import MIB

SCRATCH_BYTES = 1024 * MIB
"""More than the caches of a CPU hold."""
SECONDS = 0.3
EXPERTS = 3
"""Of a question: about as many as a step of one row finds missing in a layer."""


def measured_speeds(gate_up: Tiles, down: Tiles) -> Speeds:
    """`gate_up`, `down`: of some experts, for their shape. Without a compiler the CPU does not take part: its speed is 0."""
    sizes = [tiles.data[0].numel() for tiles in (gate_up, down)]
    count = max(EXPERTS, SCRATCH_BYTES // sum(sizes))
    pinned = PinnedMemory()
    try:
        first, second = pinned.piece(count * sum(sizes)).split([count * size for size in sizes])
        device = torch.empty(first.numel() // 4, dtype=torch.uint8, device=gate_up.data.device)
        if library() is None:
            return Speeds(host=0.0, disk=0.0, link=_copied(first, device, SECONDS))
        mailbox = pinned.piece(mailbox_bytes(gate_up.inputs))
        parts = [part.view(count, *tiles.data.shape[1:]) for part, tiles in ((first, gate_up), (second, down))]
        share = CpuShare([parts[0]], [parts[1]], gate_up, mailbox, down.tile_blocks)
        asking = _Asking(share, mailbox, count)
        asking.start()
        link = _copied(first, device, SECONDS)
        host = asking.finish()
        share.close()
        return Speeds(host=host, disk=0.0, link=link)
    finally:
        torch.cuda.synchronize()
        pinned.close()


def _copied(host: Tensor, device: Tensor, seconds: float) -> float:
    """Bytes per second of copies."""
    size, num_bytes, began = device.numel(), 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for first in range(0, host.numel() - size + 1, size):
            device.copy_(host[first : first + size], non_blocking=True)
            num_bytes += size
        torch.cuda.synchronize()
    return num_bytes / (time.perf_counter() - began)


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

    def finish(self) -> float:
        """Bytes per second, questions and answers included."""
        self._is_over = True
        self.join()
        counts = self._share.counts
        return counts.num_bytes / counts.busy_seconds
