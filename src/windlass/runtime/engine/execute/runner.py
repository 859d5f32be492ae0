"""Runs the decoder on the buffers of a step. Knows no requests, no sampling and no model.

Buffers are allocated at their maximum size and refilled in place. So on the CPU the decoder is recorded once, as a flat list of native
operations, and replayed without Python. On CUDA, decode steps are graphs (graphs.py). All other steps, and decoders that cannot be
recorded, run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from windlass.core.constants import BLOCK_TOKENS
from windlass.runtime.engine.execute.buffers import Buffers
from windlass.runtime.engine.execute.graphs import FEW_SIZES, SIZES, CapturedGraph, DecodeGraphs, InFlightStep, compile_kernels
from windlass.runtime.engine.execute.step_writer import StepWriter
from windlass.runtime.engine.execute.verify_graphs import InFlightVerify, Rows, VerifyGraph, VerifyGraphs, next_rows
from windlass.runtime.engine.schedule.scheduler import Chunk, SchedulerLimits
from windlass.runtime.engine.timeline import mark
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.program.only_views import NotRecordable
from windlass.runtime.kernels.step import KvCache, Step
from windlass.runtime.kernels.torch_threads import one_thread
from windlass.runtime.nn.adapters import Adapters, row_ranges

Decoder = Callable[[Step, Sequence[KvCache]], Tensor]
"""nn.Decoder, or a fake in tests: fp32 logits of the rows that the step selects."""


class Runner:
    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[KvCache],
        limits: SchedulerLimits,
        device: str = "cpu",
        record: bool = True,
        num_tokens: int | None = None,
        is_invariant: bool = False,
    ) -> None:
        """`num_tokens`: vocabulary size; None: all columns of the logits. `is_invariant`: see `program.batch_invariant`."""
        assert limits.block_tokens == BLOCK_TOKENS, "kernels have one block size"
        self._decoder, self._caches = decoder, caches
        self._buffers = Buffers(limits, torch.device(device))
        self._writer = StepWriter(self._buffers, spare_block=limits.num_blocks)
        self._program: program.Program | None = None
        self._logits: Tensor | None = None
        self._graphs: DecodeGraphs | None = None
        self.verify_graphs: VerifyGraphs | None = None
        self._in_flight: InFlightStep | None = None
        self._verifying: InFlightVerify | None = None
        self._num_tokens, self._is_invariant = num_tokens, is_invariant
        self.adapters: Adapters | None = None
        self._adapted: tuple[program.Program, Tensor] | None = None
        """The program of steps with adapters, and its logits; recorded when the first one comes."""
        self.why_not_recorded = self._prepare(torch.device(device).type, limits) if record else "not requested"

    @property
    def device(self) -> str:
        return str(self._buffers.step.tokens.device)

    @property
    def decoder(self) -> Decoder:
        return self._decoder

    @property
    def program(self) -> program.Program | None:
        """The recorded program; None: the decoder runs eagerly."""
        return self._program

    @property
    def selects_tokens(self) -> bool:
        """Whether `next_tokens` can be used."""
        return self._graphs is not None

    @property
    def mode(self) -> str:
        """How steps run: for Info."""
        if self._program is not None:
            return "replayed"
        if self._graphs is not None and not self._graphs.why_not:
            return "CUDA graphs"
        return f"eager ({self.why_not_recorded or (self._graphs and self._graphs.why_not)})"

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """fp32 logits of the rows that the chunks need; valid until the next run."""
        if not self._is_invariant:
            return self._run(chunks)
        with program.batch_invariant():
            return self._run(chunks)

    def _run(self, chunks: Sequence[Chunk]) -> Tensor:
        self._in_flight = self._verifying = None
        if self.adapters is not None and any(chunk.sequence.adapter for chunk in chunks):
            return self._run_adapted(chunks, self.adapters)
        captured = self._fill_buffers(chunks)
        if captured is not None:
            captured.graph.replay()
            return captured.logits[: int(self._buffers.counts[2])]
        if self._program is not None:
            assert self._logits is not None
            self._program.run()
            return self._logits[: int(self._buffers.counts[2])]
        with torch.inference_mode():
            return self._decoder(self._buffers.step, self._caches)

    def set_adapters(self, adapters: Adapters) -> None:
        """Also after its adapters have changed."""
        self.adapters, self._adapted = adapters, None

    def _run_adapted(self, chunks: Sequence[Chunk], adapters: Adapters) -> Tensor:
        """A step in which some rows have an adapter: its own recorded program, or without graphs."""
        buffers = self._buffers
        buffers.wait()
        buffers.upload(len(chunks), self._writer.write(chunks))
        starts = buffers.starts.tolist()
        adapters.rows = row_ranges(starts, [chunk.sequence.adapter for chunk in chunks])
        adapters.enabled = True
        try:
            if self._program is None:
                with torch.inference_mode():
                    return self._decoder(buffers.step, self._caches)
            if self._adapted is None:
                with program.record(buffers.step.counts[0:1]) as recorded:
                    logits = self._decoder(buffers.step, self._caches)
                self._adapted = recorded, logits
            with one_thread(self.device):
                self._adapted[0].run()
            return self._adapted[1][: int(buffers.counts[2])]
        finally:
            adapters.enabled = False

    def _prepare(self, device: str, limits: SchedulerLimits) -> str:
        """Returns why steps cannot be replayed; empty: they can."""
        if device == "cpu":
            return self._record()
        if device != "cuda" or torch.version.hip is not None:
            return "not on a CPU or an NVIDIA GPU"
        if any(cache.keys.shape[0] <= limits.num_blocks for cache in self._caches):
            return "caches without a spare block"
        buffers, most = self._buffers, limits.max_sequences
        sizes = FEW_SIZES if getattr(self._tier, "reads_all", False) else SIZES
        self._graphs = DecodeGraphs(
            self._decoder, self._caches, buffers.step, buffers.device_counts, most, self._num_tokens, sizes
        )
        if limits.max_drafts:
            self.verify_graphs = VerifyGraphs(
                self._decoder, self._caches, buffers.step, buffers.device_counts, limits.max_decode_rows, self._num_tokens
            )
        return ""

    @property
    def _tier(self) -> Any:
        return getattr(self._decoder, "tier", None)

    @property
    def copies_weights(self) -> bool:
        """Whether every step of many rows copies weights to the device."""
        return self._graphs is not None and self._tier is not None

    @property
    def reads_disk(self) -> bool:
        """Whether it reads some of them from disk."""
        return self.copies_weights and getattr(self._tier, "reads_disk", False)

    # --- graphs

    def warm_up(self) -> None:
        """Captures the graphs that most steps need, before the first request; without graphs, compiles their kernels."""
        if self._graphs is None:
            compile_kernels(self._decoder, self._caches, self._buffers.step)
            return
        most = len(self._buffers.lengths)
        self._writer.pad(0, most)
        self._buffers.upload(most, blocks_changed=True)
        prepare = getattr(self._decoder, "prepare", None)
        if prepare is not None:
            verified = [] if self.verify_graphs is None else self.verify_graphs.usual_steps()
            drafts = [] if self.verify_graphs is None else self.verify_graphs.usual_drafts()
            with torch.inference_mode():
                steps = self._graphs.usual_steps() + verified
                prepare(len(self._buffers.tokens), steps, self._caches, drafts)
        mark("kernels compiled")
        self._graphs.capture_usual()
        if self.verify_graphs is not None:
            self.verify_graphs.capture_usual()
        mark("graphs captured")

    def next_tokens(self, chunks: Sequence[Chunk], ahead: bool) -> list[int | None] | None:
        """The argmax of each chunk, or None where its logits are NaN or infinite. None instead of the list: call `run`.

        `ahead`: the next step is launched, with the same sequences, before this one is done. It is used if the next call is for exactly
        these sequences; otherwise what it wrote lies behind the last token of a sequence, and is overwritten or never read.
        """
        step, self._in_flight, self._verifying = self._in_flight, None, None
        if self._graphs is None or not all(_is_decode(chunk) for chunk in chunks):
            return None
        if step is None or step.sequences != _identities(chunks):
            step = self._launch(chunks)
        if step is None:
            return None
        if ahead:
            self._in_flight = self._launch_next(step, chunks)
        step.done.synchronize()
        return [token if token >= 0 else None for token in step.tokens[: len(chunks)].tolist()]

    @property
    def under_way(self) -> str:
        """What was launched before anybody asked for it: a step without drafts ("plain"), or with those made on the device ("model")."""
        return "plain" if self._in_flight is not None else "model" if self._verifying is not None else ""

    def verified(self, chunks: Sequence[Chunk], ahead: bool = False) -> tuple[list[list[int | None]], list[list[int]]] | None:
        """The argmax of every row of each chunk with its drafts, and the draft that would follow each (empty: nothing drafts on the device).
        None: call `run`.

        `ahead`: as of `next_tokens`, where each sequence has one draft and the next one is made on the device."""
        step, self._in_flight, self._verifying = self._verifying, None, None
        if not _are_verified(chunks):
            return None
        if step is None or step.rows != _rows(chunks):
            step = self._launch_verify(chunks)
        if step is None:
            return None
        following = self._verify_next(step, chunks) if ahead else None
        step.done.synchronize()
        chosen, *drafted = step.found.tolist()
        if following is not None:
            following.rows = next_rows(step.rows, chosen, drafted[0])
            self._verifying = following
        starts = [0, *accumulate(chunk.stop - chunk.start for chunk in chunks)]
        tokens = [[token if token >= 0 else None for token in chosen[first:last]] for first, last in pairwise(starts)]
        return tokens, [drafted[0][first:last] for first, last in pairwise(starts)] if drafted else []

    def _launch_verify(self, chunks: Sequence[Chunk]) -> InFlightVerify | None:
        captured = self._fill_verify(chunks)
        if captured is None:
            return None
        assert self.verify_graphs is not None
        step = self.verify_graphs.launch(captured, _rows(chunks))
        step.next_slots_known = _have_room(chunks, 2)
        return step

    def _verify_next(self, step: InFlightVerify, chunks: Sequence[Chunk]) -> InFlightVerify | None:
        """The same sequences with one or two tokens more each, and the drafts after those, which the graph has put into the buffers; None: they have
        no slots yet, or not one draft each."""
        graphs, longest = self.verify_graphs, max(chunk.stop for chunk in chunks)
        assert graphs is not None
        can = graphs.draft is not None and all(len(chunk.drafts) == 1 for chunk in chunks)
        if not can or not step.next_slots_known or not graphs.covers(step.captured, longest + 2):
            return None
        self._buffers.wait()
        rows = [chunk.sequence for chunk in chunks for _ in range(2)]
        changed = [self._writer.write_blocks(number, sequence) for number, sequence in enumerate(rows)]
        if any(changed):
            self._buffers.upload_blocks(len(rows))
        following = graphs.launch(step.captured, [])
        following.next_slots_known = _have_room(chunks, 4)
        return following

    def _launch(self, chunks: Sequence[Chunk]) -> InFlightStep | None:
        captured = self._fill_buffers(chunks)
        if not isinstance(captured, CapturedGraph) or self._graphs is None:
            return None
        step = self._graphs.launch(captured, _identities(chunks), max(chunk.stop for chunk in chunks))
        step.next_slots_known = _have_room(chunks, 1)
        return step

    def _launch_next(self, step: InFlightStep, chunks: Sequence[Chunk]) -> InFlightStep | None:
        """The same sequences with one token more each, which the graph has put into the buffers; None: they have no slots yet."""
        assert self._graphs is not None
        longest = step.longest + 1
        if not step.next_slots_known or not self._graphs.covers(step.captured, longest):
            return None
        self._buffers.wait()
        changed = [self._writer.write_blocks(number, chunk.sequence) for number, chunk in enumerate(chunks)]
        if any(changed):
            self._buffers.upload_blocks(len(chunks))
        following = self._graphs.launch(step.captured, [(who, at + 1) for who, at in step.sequences], longest)
        following.next_slots_known = _have_room(chunks, 2)
        return following

    def _fill_buffers(self, chunks: Sequence[Chunk]) -> CapturedGraph | VerifyGraph | None:
        """Returns the graph to replay on them, if this is a decode step."""
        if _are_verified(chunks) and (verified := self._fill_verify(chunks)) is not None:
            return verified
        buffers, count = self._buffers, len(chunks)
        buffers.wait()
        changed = self._writer.write(chunks)
        is_decode = self._graphs is not None and bool((buffers.counts == count).all())
        size = self._graphs.size(count) if self._graphs is not None and is_decode else None
        if size is None:
            buffers.upload(count, changed)
            return None
        assert self._graphs is not None
        if size > count:
            changed |= self._writer.pad(count, size)
        buffers.upload(size, changed)
        return self._graphs.get(size, int(buffers.lengths[:count].max()))

    def _fill_verify(self, chunks: Sequence[Chunk]) -> VerifyGraph | None:
        """Each row as a sequence of its own; None: there is no graph for so many."""
        graphs, buffers = self.verify_graphs, self._buffers
        rows = sum(chunk.stop - chunk.start for chunk in chunks)
        size = None if graphs is None or rows > len(buffers.lengths) else graphs.size(rows)
        if graphs is None or size is None:
            return None
        buffers.wait()
        changed = self._writer.write_rows_apart(chunks)
        if size > rows:
            changed |= self._writer.pad(rows, size)
        buffers.upload(size, changed)
        return graphs.get(size, int(buffers.lengths[:rows].max()))

    def _record(self) -> str:
        """Returns why it cannot be recorded; empty: it was."""
        if not program.available():
            return "no compiled kernels"
        try:
            with program.batch_invariant(self._is_invariant), program.record(self._buffers.step.counts[0:1]) as recorded:
                self._logits = self._decoder(self._buffers.step, self._caches)
        except NotRecordable as error:
            self._logits = None
            return str(error)
        self._program = recorded
        return ""


def _is_decode(chunk: Chunk) -> bool:
    """One token, after which the next is sampled."""
    return chunk.stop - chunk.start == 1 and chunk.is_sampled and chunk.num_logits == 1


def _are_verified(chunks: Sequence[Chunk]) -> bool:
    """A decode step in which some sequences have drafts."""
    return any(chunk.drafts for chunk in chunks) and all(
        chunk.num_known - chunk.start == 1 and chunk.is_sampled and chunk.logits_from == chunk.start for chunk in chunks
    )


def _have_room(chunks: Sequence[Chunk], more: int) -> bool:
    """Whether every sequence has slots for so many more tokens."""
    return all(len(chunk.sequence.blocks) * BLOCK_TOKENS >= chunk.stop + more for chunk in chunks)


def _identities(chunks: Sequence[Chunk]) -> list[tuple[object, int]]:
    return [(chunk.sequence, chunk.start) for chunk in chunks]  # which compare by identity


def _rows(chunks: Sequence[Chunk]) -> Rows:
    return [(chunk.sequence, chunk.start, chunk.tokens) for chunk in chunks]  # sequences compare by identity
