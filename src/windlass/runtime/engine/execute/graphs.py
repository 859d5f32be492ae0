"""Decode steps as CUDA graphs: one per batch size and sequence-length class, captured at the start or when first needed, then replayed.

A step with fewer rows than its graph is padded with rows that write to a spare block. A graph ends with the argmax of each row and
advances the buffers to the next step, so that the next one can be launched without the host. Knows no model and no requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from windlass.runtime.engine.execute.capture import capturing
from windlass.runtime.kernels.cuda.greedy import greedy, workspace
from windlass.runtime.kernels.step import KvCache, Step

# A padding row costs experts of its own, so small sizes are spaced closely.
SIZES = (*range(1, 9), *range(10, 17, 2), *range(20, 33, 4), *range(40, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
FEW_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Where all weights are read whatever the rows, and a step takes long."""
LENGTHS = (512, 2048, 8192, 32768, 131072, 2**20)
"""Classes of the longest sequence: attention is split over the device accordingly."""
USUAL_LENGTHS = 2
"""So many of these are captured before the first request."""


@dataclass
class CapturedGraph:
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    chosen: Tensor
    """int32, the argmax of each row; -1: its logits are NaN or infinite."""
    longest: int
    """Its length class."""


@dataclass
class InFlightStep:
    """A step that was launched."""

    captured: CapturedGraph
    sequences: list[tuple[object, int]]
    """(sequence, position of its token)."""
    longest: int
    tokens: Tensor
    """In host memory, valid once `done`."""
    done: torch.cuda.Event
    next_slots_known: bool = False
    """Whether the block table at launch covers the next tokens too: the graph reads their slots at its end."""


class DecodeGraphs:
    def __init__(
        self,
        decoder: Callable[[Step, Sequence[KvCache]], Tensor],
        caches: Sequence[KvCache],
        step: Step,
        counts: Tensor,
        most: int,
        num_tokens: int | None,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        """`step`: the buffers at full size; `counts`: step.counts on the device; `most`: maximum rows of a step; `sizes`: rows of graphs."""
        self._decoder, self._caches, self._step, self._counts = decoder, caches, step, counts
        self._num_tokens = num_tokens
        self._space = workspace(most, step.tokens.device)
        self._sizes = [size for size in sizes if size < most] + [most]
        self._graphs: dict[tuple[int, int], CapturedGraph] = {}
        self._stream = torch.cuda.Stream(step.tokens.device)
        self._pool = torch.cuda.graph_pool_handle()
        # Two: for a step and the next one.
        self._host_tokens = [torch.empty(most, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._logits: Tensor | None = None
        """Of all graphs: valid until the next replay."""
        self.why_not = ""
        """Why graphs are not used (any more)."""

    def size(self, rows: int) -> int | None:
        """Of the smallest graph for so many rows; None: there is none."""
        at = bisect_left(self._sizes, rows)
        return None if self.why_not or at == len(self._sizes) else self._sizes[at]

    def launch(self, captured: CapturedGraph, sequences: list[tuple[object, int]], longest: int) -> InFlightStep:
        """Replays it on the current buffers, and copies the tokens to the host."""
        captured.graph.replay()
        self._host_tokens.reverse()
        tokens = self._host_tokens[0]
        tokens[: captured.chosen.shape[0]].copy_(captured.chosen, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return InFlightStep(captured, sequences, longest, tokens, done)

    def covers(self, captured: CapturedGraph, longest: int) -> bool:
        """Whether sequences of that length are in its class."""
        return captured.longest == length_class(longest)

    def capture_usual(self) -> None:
        """Largest first: smaller ones then find room in the memory of these."""
        for size in reversed(self._sizes):
            for longest in LENGTHS[:USUAL_LENGTHS]:
                if not self.why_not:
                    self.get(size, longest)

    def usual_steps(self) -> list[Step]:
        """The steps of these graphs."""
        return usual_steps(self._step, self._sizes)

    def get(self, size: int, longest: int) -> CapturedGraph | None:
        """Captures it if need be. Its results include padding rows, and are valid until the next replay.

        None: the decoder synchronizes with the device, so that it cannot be captured.
        """
        key = size, length_class(longest)
        if key not in self._graphs:
            captured = self._capture(*key)
            if captured is None:
                return None
            self._graphs[key] = captured
        return self._graphs[key]

    def _capture(self, size: int, longest: int) -> CapturedGraph | None:
        step = decode_step(self._step, size, longest)
        with torch.inference_mode():
            self._run(step)
            assert self._logits is not None
            num_tokens = self._num_tokens or self._logits.shape[1]
            graph = torch.cuda.CUDAGraph()
            try:
                with capturing(graph, self._pool, self._stream):
                    # Copied, so that graphs share the memory that they compute in.
                    logits = self._kept(self._decoder(step, self._caches))
                    chosen = greedy(logits, num_tokens, step, self._counts, self._space)
            except RuntimeError as error:
                self.why_not = str(error).splitlines()[0]
                return None
        return CapturedGraph(graph, logits, chosen, longest)

    def _run(self, step: Step) -> None:
        """Before capture, during which kernels cannot be compiled."""
        logits = self._decoder(step, self._caches)
        if self._logits is None:
            self._logits = torch.empty(self._sizes[-1], logits.shape[1], dtype=logits.dtype, device=logits.device)
        greedy(logits, self._num_tokens or logits.shape[1], copied(step), self._counts, self._space)

    def _kept(self, logits: Tensor) -> Tensor:
        assert self._logits is not None
        return self._logits[: logits.shape[0]].copy_(logits)


def usual_steps(buffers: Step, sizes: Sequence[int]) -> list[Step]:
    """Decode steps of so many rows, of the usual lengths."""
    return [decode_step(buffers, size, longest) for size in sizes for longest in LENGTHS[:USUAL_LENGTHS]]


def compile_kernels(decoder: Any, caches: Sequence[KvCache], buffers: Step) -> None:
    """Where steps are not captured: what they need is compiled before the first one. Other ranks would wait for it."""
    most = buffers.lengths.shape[0]
    sizes = [size for size in FEW_SIZES if size < most] + [most]
    prepare = getattr(decoder, "prepare", None)
    if prepare is not None:
        with torch.inference_mode():
            prepare(buffers.tokens.shape[0], usual_steps(buffers, sizes), caches)


def decode_step(buffers: Step, size: int, longest: int) -> Step:
    counts = torch.full((3,), size, dtype=torch.int32)
    starts, lengths = torch.arange(size + 1, dtype=torch.int32), torch.full((size,), longest, dtype=torch.int32)
    return replace(buffers, counts=counts, host_starts=starts, host_lengths=lengths).trimmed()


def length_class(longest: int) -> int:
    return LENGTHS[bisect_left(LENGTHS, longest)]


def copied(step: Step) -> Step:
    """A copy, so that the warmup does not advance the buffers."""
    return replace(
        step, tokens=step.tokens.clone(), positions=step.positions.clone(), slots=step.slots.clone(), lengths=step.lengths.clone()
    )
