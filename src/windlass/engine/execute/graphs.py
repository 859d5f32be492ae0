"""Decode steps as CUDA graphs: one per number of rows and class of lengths, captured when first needed, then replayed with one call.

A step of fewer rows than its graph has is filled up with rows that go to a block of their own. A graph ends with the most likely token of
each row and moves the buffers on to the step after it, so that one can follow without the host. Knows no model and no requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windlass.kernels.cuda.greedy import greedy, workspace
from windlass.kernels.step import Cache, Step

# Each row that fills a graph up costs experts of its own, so steps are fine where there are few.
SIZES = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
LENGTHS = (512, 2048, 8192, 32768, 131072, 2**20)
"""How long the longest sequence may be: attention is spread over the device accordingly."""


@dataclass
class CapturedGraph:
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    chosen: Tensor
    """int32, the most likely token of each row; -1: its logits are no numbers."""
    longest: int
    """Of its class of lengths."""


@dataclass
class InFlightStep:
    """A step that is under way."""

    captured: CapturedGraph
    sequences: list[tuple[object, int]]
    """Which, and which of their tokens."""
    longest: int
    tokens: Tensor
    """In host memory, once it is done."""
    done: torch.cuda.Event
    next_slots_known: bool = False
    """Whether the table of blocks, as it was at the launch, says where the tokens after these go: the device looks there at its end."""


class DecodeGraphs:
    def __init__(
        self,
        decoder: Callable[[Step, Sequence[Cache]], Tensor],
        caches: Sequence[Cache],
        step: Step,
        counts: Tensor,
        most: int,
        num_tokens: int | None,
    ) -> None:
        """`step`: the buffers at their full size; `counts`: step.counts on the device; `most`: rows that a step may have."""
        self._decoder, self._caches, self._step, self._counts = decoder, caches, step, counts
        self._num_tokens = num_tokens
        self._space = workspace(most, step.tokens.device)
        self._sizes = [size for size in SIZES if size < most] + [most]
        self._graphs: dict[tuple[int, int], CapturedGraph] = {}
        self._stream = torch.cuda.Stream(step.tokens.device)
        self._pool = torch.cuda.graph_pool_handle()
        # Two, for a step and the one that follows it.
        self._host_tokens = [torch.empty(most, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self.why_not = ""
        """Why steps are not captured (any more)."""

    def size(self, rows: int) -> int | None:
        """Of the graph that takes so many rows; None: there is none."""
        at = bisect_left(self._sizes, rows)
        return None if self.why_not or at == len(self._sizes) else self._sizes[at]

    def launch(self, captured: CapturedGraph, sequences: list[tuple[object, int]], longest: int) -> InFlightStep:
        """Replays it on what the buffers hold then, and has the tokens brought to the host."""
        captured.graph.replay()
        self._host_tokens.reverse()
        tokens = self._host_tokens[0]
        tokens[: captured.chosen.shape[0]].copy_(captured.chosen, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return InFlightStep(captured, sequences, longest, tokens, done)

    def serves(self, captured: CapturedGraph, longest: int) -> bool:
        """Whether it was made for sequences of that length too."""
        return captured.longest == _class(longest)

    def get(self, size: int, longest: int) -> CapturedGraph | None:
        """To be replayed on what the buffers hold. Its results have rows for those that only fill it up, and hold until the next replay.

        None: something in the decoder waits for the device, so that no step can be captured.
        """
        key = size, _class(longest)
        if key not in self._graphs:
            captured = self._capture(*key)
            if captured is None:
                return None
            self._graphs[key] = captured
        return self._graphs[key]

    def _capture(self, size: int, longest: int) -> CapturedGraph | None:
        step = self._view(size, longest)
        with torch.inference_mode():
            # Compiles kernels, which cannot be done while capturing.
            logits = self._decoder(step, self._caches)
            num_tokens = self._num_tokens or logits.shape[1]
            greedy(logits, num_tokens, _elsewhere(step), self._counts, self._space)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    logits = self._decoder(step, self._caches)
                    chosen = greedy(logits, num_tokens, step, self._counts, self._space)
            except RuntimeError as error:
                self.why_not = str(error).splitlines()[0]
                return None
        return CapturedGraph(graph, logits, chosen, longest)

    def _view(self, size: int, longest: int) -> Step:
        counts = torch.full((3,), size, dtype=torch.int32)
        starts, lengths = torch.arange(size + 1, dtype=torch.int32), torch.full((size,), longest, dtype=torch.int32)
        return replace(self._step, counts=counts, host_starts=starts, host_lengths=lengths).trimmed()


def _class(longest: int) -> int:
    return LENGTHS[bisect_left(LENGTHS, longest)]


def _elsewhere(step: Step) -> Step:
    """The same in memory of its own: the buffers still have to serve this step."""
    return replace(
        step, tokens=step.tokens.clone(), positions=step.positions.clone(), slots=step.slots.clone(), lengths=step.lengths.clone()
    )
