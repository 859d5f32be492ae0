"""Reads matrices ahead of their use, in their order, around and around. Called by the thread that computes; the reads run beside it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from windlass.runtime.kernels.packing.matrix import StackedMatrix
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.packing.tiered import StreamedMatrix
from windlass.runtime.kernels.program.reads import Priority
from windlass.runtime.offload.stream.ring import ring_layout
from windlass.runtime.offload.tiers.memory import page_aligned, view
from windlass.runtime.offload.tiers.reader import DirectReader, Read


class StreamedBlock(NamedTuple):
    offset: int
    """In the file."""
    num_bytes: int


class MatrixStream:
    """`before(i)` and `after(i)` are called for i = 0, 1, .. in turn; after an interrupted step, from any i on."""

    def __init__(self, reader: DirectReader, blocks: Sequence[StreamedBlock], ring_bytes: int) -> None:
        self._reader, self.blocks = reader, tuple(blocks)
        self._layout = ring_layout([block.num_bytes for block in blocks], ring_bytes)
        self._ring = page_aligned(ring_bytes)
        self._coming: deque[Read] = deque()
        self._issued = self._released = 0
        """Uses so far, over all steps."""
        self.num_restarts = 0

    def memory(self, index: int) -> Tensor:
        start = self._layout.offsets[index]
        return self._ring[start : start + self.blocks[index].num_bytes]

    def bind(self, index: int, streamed: StreamedMatrix, matrix: Tensor | Panels | StackedMatrix) -> None:
        """`matrix`: how it lies in `memory(index)`."""
        streamed.bind(matrix, partial(self.before, index), partial(self.after, index))

    def before(self, index: int) -> None:
        if self._released % len(self.blocks) != index:
            self._restart(index)
        self._issue()
        try:
            self._coming[0].wait()
        except BaseException:  # the next step reads it again
            self._restart(index)
            raise

    def after(self, index: int) -> None:
        self._coming.popleft()
        self._released += 1
        self._issue()

    def _issue(self) -> None:
        """Begins every read whose place is free."""
        count = len(self.blocks)
        while True:
            index = self._issued % count
            if self._issued - self._layout.waits_for[index] >= self._released or len(self._coming) == count:
                return
            # Experts first: the ring is filled while there is nothing else to read, as during the head.
            self._coming.append(self._reader.read(self.blocks[index].offset, view(self.memory(index)), Priority.IDLE))
            self._issued += 1

    def _restart(self, index: int) -> None:
        """A step was interrupted: what was read ahead for it is dropped."""
        self.num_restarts += 1
        while self._coming:
            self._coming.popleft().settle()
        self._issued = self._released = index
