"""Whole layers of experts copied to the device, two layers ahead, beside a step of many rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.kernels.cuda.tiered import ExpertSlots, share_tiles


class StreamedLayers:
    """Layers take turns in the two halves of the staging slots. After the last one, the part of the slots that belongs to the CPU in steps of few
    rows is zero again."""

    def __init__(self, gate_up: Sequence[Tensor], down: Sequence[Tensor], slots: ExpertSlots, share_blocks: int) -> None:
        self._host = list(zip(gate_up, down, strict=True))
        self._slots, self._share_blocks = slots, share_blocks
        self._half = gate_up[0].shape[0]
        self._stream = torch.cuda.Stream(slots.gate_up.data.device)
        self._copied, self._used = ([torch.cuda.Event(), torch.cuda.Event()] for _ in range(2))
        self.num_bytes = 0

    def before(self, layer: int) -> None:
        if layer == 0:
            for used in self._used:
                used.record()
            for first in range(min(2, len(self._host))):
                self._copy(first)
        self._copied[layer % 2].wait()

    def after(self, layer: int) -> None:
        self._used[layer % 2].record()
        if layer + 2 < len(self._host):
            self._copy(layer + 2)
        if layer == len(self._host) - 1:
            self.clear_share()

    def clear_share(self) -> None:
        first = self._slots.staging
        for tiles, part in ((self._slots.gate_up, share_tiles(self._share_blocks)), (self._slots.down, None)):
            staged = tiles.data[first : first + self._half]
            (staged[:, :part] if part is not None else staged[:, :, : self._share_blocks]).zero_()

    def _copy(self, layer: int) -> None:
        first = self._slots.staging + layer % 2 * self._half
        with torch.cuda.stream(self._stream):
            self._used[layer % 2].wait()
            for tiles, host in zip((self._slots.gate_up, self._slots.down), self._host[layer], strict=True):
                tiles.data[first : first + self._half].copy_(host, non_blocking=True)
                self.num_bytes += host.numel()
            self._copied[layer % 2].record()
