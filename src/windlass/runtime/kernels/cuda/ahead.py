"""Weights of one layer after another that are copied to the device ahead of their use: layers take turns in two buffers.

While a layer computes from its buffer, the next one is copied into the other. Knows neither what is copied nor where the buffers are.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Protocol

import torch

from windlass.runtime.kernels.cuda import driver

BUFFERS = 2

Copy = Callable[[int], None]
"""Copies that layer into its buffer, layer % BUFFERS."""


class Lane(Protocol):
    """Where copies run, beside the computation."""

    def mark_used(self, buffer: int) -> None:
        """What was launched up to now may still read the buffer; what is copied into it later waits for that."""
        ...

    def run(self, buffer: int, copy: Callable[[], None]) -> None: ...

    def wait(self, buffer: int) -> None:
        """What is launched from now on finds the buffer filled."""
        ...

    def settle(self) -> None:
        """What is launched from now on comes after all copies."""
        ...


class CudaLane:
    """A stream of its own, ordered with the current one by events; also inside of a CUDA graph."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._copied, self._used = ([torch.cuda.Event() for _ in range(BUFFERS)] for _ in range(2))

    def mark_used(self, buffer: int) -> None:
        self._used[buffer].record()

    def run(self, buffer: int, copy: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            self._used[buffer].wait()
            copy()
            self._copied[buffer].record()

    def wait(self, buffer: int) -> None:
        self._copied[buffer].wait()

    def settle(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)


class DirectLane:
    """Copies run where they are begun: on a CPU, for tests."""

    def mark_used(self, buffer: int) -> None:
        pass

    def run(self, buffer: int, copy: Callable[[], None]) -> None:
        copy()

    def wait(self, buffer: int) -> None:
        pass

    def settle(self) -> None:
        pass


class CopyAhead:
    """`before` and `after` are called for every layer of a step, from 0 on."""

    def __init__(self, layers: Sized, lane: Lane | None) -> None:
        """`layers`: may grow until the first step. `lane` None: there are only shapes, and nothing to copy."""
        self._layers, self._lane = layers, lane
        self._is_under_way = False

    def before(self, layer: int, copy: Copy, late: Copy | None = None) -> None:
        """Kernels that are launched from now on find the layer in its buffer. `late`: copies that are begun only now, after what was launched for
        the layers before: whoever begins them may have to wait for a disk."""
        if self._lane is None or driver.is_collecting():
            return
        if layer == 0:
            self._is_under_way = True
            for buffer in range(BUFFERS):
                self._lane.mark_used(buffer)
            for first in range(min(BUFFERS, len(self._layers))):
                self._begin(first, copy)
        if late is not None:
            self._begin(layer, late)
        self._lane.wait(layer % BUFFERS)

    def after(self, layer: int, copy: Copy) -> None:
        if self._lane is None or driver.is_collecting():
            return
        self._lane.mark_used(layer % BUFFERS)
        if layer + BUFFERS < len(self._layers):
            self._begin(layer + BUFFERS, copy)
        self._is_under_way = layer < len(self._layers) - 1

    def abandon(self) -> bool:
        """After a step that did not come to its end: its copies may still run, and nothing may use the buffers before they are done. Returns
        whether there was such a step."""
        was_under_way, self._is_under_way = self._is_under_way, False
        if was_under_way and self._lane is not None:
            self._lane.settle()
        return was_under_way

    def _begin(self, layer: int, copy: Copy) -> None:
        assert self._lane is not None
        self._lane.run(layer % BUFFERS, lambda: copy(layer))


def lane_on(device: torch.device) -> Lane | None:
    return CudaLane(device) if device.type == "cuda" else DirectLane() if device.type == "cpu" else None


def copy_rows(source: torch.Tensor, to: torch.Tensor) -> None:
    """[matrices, rows, blocks, bytes] to a part of the blocks of as many matrices: one copy of rows on a device."""
    driver.copy_rows(source, to) if to.is_cuda else to.copy_(source)
