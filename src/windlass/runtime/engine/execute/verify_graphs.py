"""Steps that verify drafts as CUDA graphs: like decode steps (graphs.py), but rows may belong to the same sequence, one after another.

Each row is a sequence of its own to the kernels, with the block table of the one it belongs to. A graph ends with the argmax of each row and,
where a layer of the model drafts, with what that layer makes of it: the next draft after each row. Which rows count is known when the host
compares them with the drafts. Where every sequence has one draft and the next one is made on the device, the graph compares them too and advances the
buffers, so that the next step can be launched before this one has been read. Knows no model and no requests.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windlass.runtime.engine.execute.capture import capturing
from windlass.runtime.engine.execute.graphs import LENGTHS, SIZES, USUAL_LENGTHS, copied, length_class
from windlass.runtime.kernels.cuda.drafts import advance_pairs
from windlass.runtime.kernels.cuda.greedy import greedy, workspace
from windlass.runtime.kernels.step import KvCache, Step

USUAL_ROWS = 16
"""Graphs of so many rows are captured before the first request."""

Draft = Callable[[Step], Tensor]
"""Logits of the token after each row; the step's tokens are those that follow its rows."""
Alter = Callable[[Tensor, Step], None]
Rows = list[tuple[object, int, list[int]]]
"""(sequence, position of its first row, tokens of its rows)."""


@dataclass
class VerifyGraph:
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    found: Tensor
    """int32 [1 or 2, rows]: the argmax of each row, -1 where its logits are NaN or infinite; the draft that follows it."""
    longest: int = 0
    """Its length class."""


@dataclass
class InFlightVerify:
    """A step that was launched."""

    captured: VerifyGraph
    found: Tensor
    """In host memory, valid once `done`."""
    done: torch.cuda.Event
    rows: Rows
    """What it computes; of a step that was launched ahead, known when the one before it has been read."""
    next_slots_known: bool = False
    """Whether the block table at launch covers the next step's rows too: the graph reads their slots at its end."""


class VerifyGraphs:
    def __init__(
        self,
        decoder: Callable[[Step, Sequence[KvCache]], Tensor],
        caches: Sequence[KvCache],
        step: Step,
        counts: Tensor,
        most: int,
        num_tokens: int | None,
    ) -> None:
        """`step`: the buffers at full size; `counts`: step.counts on the device; `most`: maximum rows of a step."""
        self._decoder, self._caches, self._step, self._num_tokens = decoder, caches, step, num_tokens
        self._counts = counts
        self.draft: Draft | None = None
        self.alter: Alter | None = None
        """For benchmarks: changes the logits of a step before tokens are chosen, in its graph."""
        self._sizes = [size for size in SIZES if size < most] + [most]
        self._graphs: dict[tuple[int, int], VerifyGraph] = {}
        self._logits: Tensor | None = None
        self.why_not = ""
        self._prepare(step.tokens.device)

    def _prepare(self, device: torch.device) -> None:
        self._space = workspace(self._sizes[-1], device)
        self._none = torch.zeros(3, dtype=torch.int32, device=device)  # so that no row becomes that of a next step
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        # Two: for a step and the next one.
        self._host = [torch.empty(2, self._sizes[-1], dtype=torch.int32, pin_memory=True) for _ in range(2)]

    def size(self, rows: int) -> int | None:
        """Of the smallest graph for so many rows; None: there is none."""
        at = bisect_left(self._sizes, rows)
        return None if self.why_not or at == len(self._sizes) else self._sizes[at]

    def get(self, size: int, longest: int) -> VerifyGraph | None:
        """Captures it if need be. Its results include padding rows, and are valid until the next replay."""
        key = size, length_class(longest)
        if key not in self._graphs:
            captured = self._capture(*key)
            if captured is None:
                return None
            self._graphs[key] = captured
        return self._graphs[key]

    def capture_usual(self) -> None:
        for size, longest in self._usual():
            if not self.why_not:
                self.get(size, longest)

    def usual_steps(self) -> list[Step]:
        """The steps of these graphs."""
        return [self.view(*key) for key in self._usual()]

    def usual_drafts(self) -> list[Callable[[], object]]:
        """What these graphs call to draft."""
        draft = self.draft
        return [] if draft is None else [functools.partial(draft, step) for step in self.usual_steps()]

    def _usual(self) -> list[tuple[int, int]]:
        """Largest first: smaller ones then find room in the memory of these."""
        sizes = [size for size in self._sizes if 1 < size <= USUAL_ROWS]
        return [(size, longest) for size in reversed(sizes) for longest in LENGTHS[:USUAL_LENGTHS]]

    def launch(self, captured: VerifyGraph, rows: Rows) -> InFlightVerify:
        """Replays it on the current buffers, and copies what it found to the host."""
        captured.graph.replay()
        self._host.reverse()
        found = self._host[0][: captured.found.shape[0], : captured.found.shape[1]]
        found.copy_(captured.found, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return InFlightVerify(captured, found, done, rows)

    def covers(self, captured: VerifyGraph, longest: int) -> bool:
        """Whether sequences of that length are in its class."""
        return captured.longest == length_class(longest)

    def _capture(self, size: int, longest: int) -> VerifyGraph | None:
        step = self.view(size, longest)
        with torch.inference_mode():
            self._pass(copied(step))  # kernels cannot be compiled during capture
            graph = torch.cuda.CUDAGraph()
            try:
                with capturing(graph, self._pool, self._stream):
                    logits, found = self._pass(step)
            except RuntimeError as error:
                self.why_not = str(error).splitlines()[0]
                return None
        return VerifyGraph(graph, logits, found, longest)

    def _pass(self, step: Step) -> tuple[Tensor, Tensor]:
        logits = self._decoder(step, self._caches)
        if self._logits is None:
            self._logits = torch.empty(self._sizes[-1], logits.shape[1], dtype=logits.dtype, device=logits.device)
        kept = self._logits[: logits.shape[0]].copy_(logits)  # so that graphs share the memory that they compute in
        if self.alter is not None:
            self.alter(kept, step)
        found = torch.empty(2 if self.draft else 1, logits.shape[0], dtype=torch.int32, device=logits.device)
        self._argmax(kept, step, found[0])
        if self.draft is not None:
            self._argmax(self.draft(replace(step, tokens=found[0].clamp(min=0))), step, found[1])
            self._advance(found, step)
        return kept, found

    def _argmax(self, logits: Tensor, step: Step, out: Tensor) -> None:
        greedy(logits, self._num_tokens or logits.shape[1], step, self._none, self._space, out)

    def _advance(self, found: Tensor, step: Step) -> None:
        """Of steps whose sequences have other numbers of drafts nothing sensible comes, and nobody uses it."""
        if found.shape[1] > 1:
            advance_pairs(found[0], found[1], step, self._counts)

    def view(self, size: int, longest: int) -> Step:
        counts = torch.full((3,), size, dtype=torch.int32)
        starts, lengths = torch.arange(size + 1, dtype=torch.int32), torch.full((size,), longest, dtype=torch.int32)
        step = replace(self._step, counts=counts, host_starts=starts, host_lengths=lengths, is_chained=True)
        return step.trimmed()


def next_rows(rows: Rows, chosen: Sequence[int], drafted: Sequence[int]) -> Rows:
    """Of the step that the device goes on with, after one whose sequences have a draft each: as runtime/kernels/cuda/sources/drafts.cu."""
    following: Rows = []
    for number, (sequence, start, tokens) in enumerate(rows):
        accepted = int(chosen[2 * number] == tokens[1])
        at = 2 * number + accepted
        following.append((sequence, start + 1 + accepted, [chosen[at], drafted[at]]))
    return following
