"""Steps that verify drafts as CUDA graphs: like decode steps (graphs.py), but rows may belong to the same sequence, one after another.

Each row is a sequence of its own to the kernels, with the block table of the one it belongs to. A graph ends with the argmax of each row and,
where a layer of the model drafts, with what that layer makes of it: the next draft after each row. Which rows count is known when the host
compares them with the drafts. Knows no model and no requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windlass.engine.execute.capture import capturing
from windlass.engine.execute.graphs import LENGTHS, SIZES, USUAL_LENGTHS, length_class
from windlass.kernels.cuda.greedy import greedy, workspace
from windlass.kernels.step import KvCache, Step

USUAL_ROWS = 16
"""Graphs of so many rows are captured before the first request."""

Draft = Callable[[Step], Tensor]
"""Logits of the token after each row; the step's tokens are those that follow its rows."""


@dataclass
class VerifyGraph:
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    found: Tensor
    """int32 [1 or 2, rows]: the argmax of each row, -1 where its logits are NaN or infinite; the draft that follows it."""


class VerifyGraphs:
    def __init__(
        self,
        decoder: Callable[[Step, Sequence[KvCache]], Tensor],
        caches: Sequence[KvCache],
        step: Step,
        most: int,
        num_tokens: int | None,
    ) -> None:
        """`step`: the buffers at full size; `most`: maximum rows of a step."""
        self._decoder, self._caches, self._step, self._num_tokens = decoder, caches, step, num_tokens
        self.draft: Draft | None = None
        self._sizes = [size for size in SIZES if size < most] + [most]
        self._graphs: dict[tuple[int, int], VerifyGraph] = {}
        self._logits: Tensor | None = None
        self.why_not = ""
        self._prepare(step.tokens.device)

    def _prepare(self, device: torch.device) -> None:
        self._space = workspace(self._sizes[-1], device)
        self._none = torch.zeros(3, dtype=torch.int32, device=device)  # so that no row becomes that of a next step
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._host = torch.empty(2, self._sizes[-1], dtype=torch.int32, pin_memory=True)

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
        for size in reversed([size for size in self._sizes if 1 < size <= USUAL_ROWS]):
            for longest in LENGTHS[:USUAL_LENGTHS]:
                if not self.why_not:
                    self.get(size, longest)

    def tokens(self, captured: VerifyGraph) -> list[list[int]]:
        """Replays it on the current buffers; waits for what it found."""
        captured.graph.replay()
        found = captured.found
        host = self._host[: found.shape[0], : found.shape[1]]
        host.copy_(found, non_blocking=True)
        torch.cuda.current_stream().synchronize()
        return host.tolist()

    def _capture(self, size: int, longest: int) -> VerifyGraph | None:
        step = self.view(size, longest)
        with torch.inference_mode():
            self._pass(step)  # kernels cannot be compiled during capture
            graph = torch.cuda.CUDAGraph()
            try:
                with capturing(graph, self._pool, self._stream):
                    logits, found = self._pass(step)
            except RuntimeError as error:
                self.why_not = str(error).splitlines()[0]
                return None
        return VerifyGraph(graph, logits, found)

    def _pass(self, step: Step) -> tuple[Tensor, Tensor]:
        logits = self._decoder(step, self._caches)
        if self._logits is None:
            self._logits = torch.empty(self._sizes[-1], logits.shape[1], dtype=logits.dtype, device=logits.device)
        kept = self._logits[: logits.shape[0]].copy_(logits)  # so that graphs share the memory that they compute in
        chosen = self._argmax(kept, step)
        if self.draft is None:
            return kept, chosen[None]
        following = self._argmax(self.draft(replace(step, tokens=chosen.clamp(min=0))), step)
        return kept, torch.stack((chosen, following))

    def _argmax(self, logits: Tensor, step: Step) -> Tensor:
        return greedy(logits, self._num_tokens or logits.shape[1], step, self._none, self._space)

    def view(self, size: int, longest: int) -> Step:
        counts = torch.full((3,), size, dtype=torch.int32)
        starts, lengths = torch.arange(size + 1, dtype=torch.int32), torch.full((size,), longest, dtype=torch.int32)
        step = replace(self._step, counts=counts, host_starts=starts, host_lengths=lengths, is_chained=True)
        return step.trimmed()
