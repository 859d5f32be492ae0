"""Decode steps as CUDA graphs: one per number of rows and class of lengths, captured when first needed, then replayed with one call.

A step of fewer rows than its graph has is filled up with rows that go to a block of their own. Knows no model and no requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.kernels.step import Cache, Step

# Each row that fills a graph up costs experts of its own, so steps are fine where there are few.
SIZES = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
LENGTHS = (512, 2048, 8192, 32768, 131072, 2**20)
"""How long the longest sequence may be: attention is spread over the device accordingly."""


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor


class Graphs:
    def __init__(
        self, decoder: Callable[[Step, Sequence[Cache]], Tensor], caches: Sequence[Cache], step: Step, most: int
    ) -> None:
        """`step`: the buffers at their full size; `most`: rows that a step may have."""
        self._decoder, self._caches, self._step = decoder, caches, step
        self._sizes = [size for size in SIZES if size < most] + [most]
        self._graphs: dict[tuple[int, int], _Captured] = {}
        self._stream = torch.cuda.Stream(step.tokens.device)
        self._pool = torch.cuda.graph_pool_handle()
        self.why_not = ""
        """Why steps are not captured (any more)."""

    def size(self, rows: int) -> int | None:
        """Of the graph that takes so many rows; None: there is none."""
        at = bisect_left(self._sizes, rows)
        return None if self.why_not or at == len(self._sizes) else self._sizes[at]

    def run(self, size: int, longest: int) -> Tensor:
        """Logits of what the buffers hold, those of rows that only fill it up included. Valid until the next run."""
        key = size, LENGTHS[bisect_left(LENGTHS, longest)]
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._graphs[key] = self._capture(*key)
        captured.graph.replay()
        return captured.logits

    def _capture(self, size: int, longest: int) -> _Captured:
        step = self._view(size, longest)
        with torch.inference_mode():
            self._decoder(step, self._caches)  # compiles kernels, which cannot be done while capturing
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                logits = self._decoder(step, self._caches)
        return _Captured(graph, logits)

    def _view(self, size: int, longest: int) -> Step:
        step = self._step
        return Step(
            tokens=step.tokens[:size],
            positions=step.positions[:size],
            slots=step.slots[:size],
            starts=step.starts[: size + 1],
            lengths=step.lengths[:size],
            blocks=step.blocks[:size],
            logit_rows=step.logit_rows[:size],
            counts=torch.tensor([size, size, size], dtype=torch.int32),
            host_starts=torch.arange(size + 1, dtype=torch.int32),
            host_lengths=torch.full((size,), longest, dtype=torch.int32),
        )
