"""Whole layers of experts copied to the device, two layers ahead, beside a step of many rows; those on disk as they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from windlass.runtime.kernels.cuda.ahead import BUFFERS, CopyAhead, copy_rows, lane_on
from windlass.runtime.kernels.cuda.tiered import ExpertSlots, share_tiles
from windlass.runtime.offload.device.prompts import LayerReads


class HostExperts(NamedTuple):
    """The experts of a layer that lie in host memory, pinned. Down is cut where the CPU's part ends, so that both parts are read in one piece."""

    gate_up: Tensor
    """uint8 [experts, tiles, blocks, block bytes]"""
    down_share: Tensor
    """The blocks whose inputs the CPU computes."""
    down: Tensor
    """The others."""

    def put(self, place: int, gate_up: Tensor, down: Tensor, *, non_blocking: bool = False) -> None:
        """An expert as it lies on the device."""
        blocks = self.down_share.shape[2]
        self.gate_up[place].copy_(gate_up, non_blocking=non_blocking)
        self.down_share[place].copy_(down[:, :blocks].contiguous(), non_blocking=non_blocking)
        self.down[place].copy_(down[:, blocks:].contiguous(), non_blocking=non_blocking)


class StreamedLayers:
    """Layers take turns in the two halves of the staging slots. After the last one, the part of the slots that belongs to the CPU in steps of few
    rows is zero again."""

    def __init__(
        self,
        host: Sequence[HostExperts],
        slots: ExpertSlots,
        share_blocks: int,
        on_disk: int = 0,
        reads: LayerReads | None = None,
    ) -> None:
        """`on_disk`: experts of each layer that `reads` copies; their slots follow those of experts in host memory."""
        self._host, self._slots, self._share_blocks = host, slots, share_blocks
        self._in_host, self._on_disk, self._reads = host[0].gate_up.shape[0], on_disk, reads
        self._ahead = CopyAhead(host, lane_on(slots.gate_up.data.device))

    def before(self, layer: int) -> None:
        if self._reads is None:
            self._ahead.before(layer, self._copy)
        else:
            self._ahead.before(layer, self._copy, self._copy_disk)

    def after(self, layer: int) -> None:
        self._ahead.after(layer, self._copy)
        if layer == len(self._host) - 1:
            self.clear_share()

    def abandon(self) -> None:
        """After a step that did not come to its end."""
        if self._ahead.abandon():
            if self._reads is not None:
                self._reads.abandon()
            self.clear_share()

    def clear_share(self) -> None:
        if self._slots.gate_up.data.is_meta:
            return
        first, last = self._slots.staging, self._slots.first_ahead(0) + BUFFERS * self._slots.num_ahead
        for tiles, part in ((self._slots.gate_up, share_tiles(self._share_blocks)), (self._slots.down, None)):
            staged = tiles.data[first:last]
            (staged[:, :part] if part is not None else staged[:, :, : self._share_blocks]).zero_()

    def _copy(self, layer: int) -> None:
        host, blocks = self._host[layer], self._share_blocks
        if not self._in_host:
            return
        gate_up, down = self._staged(layer, 0, self._in_host)
        gate_up.copy_(host.gate_up, non_blocking=True)
        copy_rows(host.down_share, down[:, :, :blocks])
        copy_rows(host.down, down[:, :, blocks:])

    def _copy_disk(self, layer: int) -> None:
        assert self._reads is not None
        if layer == 0:
            self._reads.start()
        self._reads.copy(layer, *self._staged(layer, self._in_host, self._on_disk))

    def _staged(self, layer: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Some of the staging slots of a layer."""
        start = self._slots.staging + layer % BUFFERS * (self._in_host + self._on_disk) + first
        gate_up, down = (tiles.data[start : start + count] for tiles in (self._slots.gate_up, self._slots.down))
        return gate_up, down
