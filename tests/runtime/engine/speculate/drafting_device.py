"""An engine that verifies drafts on a device on the CPU (late_device), in steps that are graphs."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from drafting import Oracle
from fake_decoder import FakeDecoder
from late_device import LateGraphs, Replay, Stream, advance_pairs_reference, make_late_engine
from torch import Tensor

from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.execute.graphs import copied
from windlass.runtime.engine.execute.verify_graphs import InFlightVerify, Rows, VerifyGraph, VerifyGraphs
from windlass.runtime.engine.speculate.speculation import Speculation
from windlass.runtime.kernels.step import Step

VOCAB, SPOILED = 64, 5


class DeviceGraphs(VerifyGraphs):
    """Replays run the decoder on the CPU, as early or as late as a device may; an argmax for the kernel that finds it."""

    stream: Stream

    def _prepare(self, device: torch.device) -> None:
        self.sizes_run: set[int] = set()
        self.num_launched = 0

    def _capture(self, size: int, longest: int) -> VerifyGraph:
        step = self.view(size, longest)
        self.stream.synchronize()
        captured = VerifyGraph(None, *self._pass(copied(step)), longest)  # type: ignore[arg-type]

        def work() -> None:
            self.sizes_run.add(size)
            assert int(step.lengths.max()) <= longest
            logits, found = self._pass(step)
            captured.logits.copy_(logits)
            captured.found.copy_(found)

        captured.graph = Replay(self.stream, work)  # type: ignore[assignment]
        return captured

    def launch(self, captured: VerifyGraph, rows: Rows) -> InFlightVerify:
        self.num_launched += 1
        replay: Any = captured.graph
        self.stream.launch(replay.work, captured.found.shape[1])
        found = torch.full_like(captured.found, 2**30)
        return InFlightVerify(captured, found, self.stream.launch(lambda: found.copy_(captured.found)), rows)  # type: ignore[arg-type]

    def _argmax(self, logits: Tensor, step: Step, out: Tensor) -> None:
        out.copy_(logits[:, : self._num_tokens].argmax(-1))

    def _advance(self, found: Tensor, step: Step) -> None:
        advance_pairs_reference(found[0], found[1], step, self._counts)


def engine_on_device(
    decoder: FakeDecoder,
    patch: Any,
    *,
    wrong: float,
    drafts_there: bool,
    ngram: bool = False,
    late: bool = True,
    auto: bool = False,
    spoiled: int = 1,
    **changes: Any,
) -> Engine:
    engine = make_late_engine(decoder, patch, late=late, max_drafts=3, **({"max_step_logits": 16} | changes))
    made, buffers = engine.runner, engine.runner._buffers
    graphs = DeviceGraphs(decoder, made._caches, buffers.step, buffers.device_counts, engine.limits.max_decode_rows, VOCAB)
    assert isinstance(made._graphs, LateGraphs)
    made.verify_graphs, graphs.stream = graphs, made._graphs._stream

    def after(step: Step) -> Tensor:
        """What follows the token that follows each row; if `wrong`, not after `spoiled` tokens in five."""
        rows: list[Tensor] = []
        for row, token in enumerate(step.tokens.tolist()):
            history = decoder.history(made._caches[0], step, row)
            rows.append(decoder.logits([*history, token]).roll(1 if wrong and token % SPOILED < spoiled else 0))
        return torch.stack(rows)

    graphs.draft = after if drafts_there else None
    oracle = Oracle(lambda history, count: decoder.greedy(history, count), wrong, VOCAB)
    engine.speculation = Speculation(
        auto=auto,
        ngram=ngram,
        model=oracle,
        max_drafts=3,
        model_drafts=1 if drafts_there else 3,
        clock=itertools.count().__next__,
    )
    return engine
