"""Drafts made by a model: the main model's MTP layer, or a small model with the same tokens.

It has a KV cache of its own with the blocks of the main one: a token's keys and values lie at the same place in both, so the block table,
the prefix cache and preemption serve both. It runs through a Runner of its own, recorded like the main one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from windlass.core.constants import BLOCK_TOKENS
from windlass.core.request import GREEDY
from windlass.runtime.engine.execute.runner import Runner
from windlass.runtime.engine.sample.sampler import Sampler, SamplingState, select_rows
from windlass.runtime.engine.schedule.scheduler import Chunk
from windlass.runtime.engine.schedule.sequence import Sequence as EngineSequence


@dataclass(slots=True)
class GivenChunk(Chunk):
    """Rows of a drafting model: its input tokens are given."""

    given: list[int] = field(default_factory=list[int])

    @property
    def tokens(self) -> list[int]:  # type: ignore[override]
        return self.given


class MtpInputs(Protocol):
    """nn.mtp_pass.MtpPass."""

    inputs: Tensor
    """[rows, width]: the hidden state of each row, filled before a run."""
    outputs: Tensor
    """Of the last run."""


@dataclass(slots=True)
class LastRow:
    """Of a sequence in the last run: where drafting goes on."""

    position: int
    row: int


class ModelDrafter:
    def __init__(self, runner: Runner, sampler: Sampler, main: Any, mtp: MtpInputs | None = None) -> None:
        """`main`: the main decoder, whose `normed` are the hidden states of the last step. `mtp` None: a model of its own."""
        self._runner, self._sampler, self._main, self._mtp = runner, sampler, main, mtp
        self._followed: dict[int, tuple[int, int]] = {}
        """Tokens of each sequence that are in the cache, and its preemption count then."""
        self._logits: Tensor | None = None
        self._last: dict[int, LastRow] = {}
        self._hidden_rows: dict[int, int] = {}

    def forget(self, number: int) -> None:
        self._followed.pop(number, None)

    def followed(self, sequence: EngineSequence) -> None:
        self._followed[sequence.id] = (sequence.num_computed, sequence.num_preemptions)

    def can_follow(self, chunk: Chunk) -> bool:
        """From its beginning, or from where it was followed to. The cache of what was found in the prefix cache is that of whoever computed it."""
        known = self._followed.get(chunk.sequence.id)
        return chunk.start <= (max(chunk.sequence.num_cached, 0) if known is None else known[0])

    def follow(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> None:
        given = [self._following(chunk) for chunk in chunks]
        kept = [(chunk, new, row) for chunk, new, row in zip(chunks, given, rows, strict=True) if new.stop > new.start]
        self._last, self._logits = {}, None
        if not kept:
            return
        if self._mtp is not None:
            self._gather(
                self._mtp, [range(row + new.start - chunk.start, row + new.stop - chunk.start) for chunk, new, row in kept]
            )
        self._run([new for _, new, _ in kept])

    def draft(self, wanted: Sequence[tuple[EngineSequence, int]]) -> list[tuple[int, ...]]:
        found: dict[int, list[int]] = {sequence.id: [] for sequence, _ in wanted}
        for depth in range(max(count for _, count in wanted)):
            going = [sequence for sequence, count in wanted if count > depth and sequence.id in self._last]
            if not going or self._logits is None:
                break
            rows = [self._last[sequence.id].row for sequence in going]
            tokens = self._sampler.sample(select_rows(self._logits, rows), [draft_state(sequence, depth) for sequence in going])
            for sequence, token in zip(going, tokens, strict=True):
                if token is not None:
                    found[sequence.id].append(token)
            going = [sequence for sequence, count in wanted if count > depth + 1 and len(found[sequence.id]) == depth + 1]
            going = [sequence for sequence in going if self._has_slot(sequence, self._last[sequence.id].position + 1)]
            self._extend(going, found)
        return [tuple(found[sequence.id]) for sequence, _ in wanted]

    # --- rows

    def _following(self, chunk: Chunk) -> GivenChunk:
        """What is new of a sequence. The MTP layer takes the token after each position, a model the tokens, up to the newest one."""
        sequence = chunk.sequence
        done, since = self._followed.get(sequence.id, (0, -1))
        start, stop, decodes = chunk.start, sequence.num_computed, sequence.num_pending == 1
        if self._mtp is None:
            if since == sequence.num_preemptions and chunk.start < done:
                start = min(done, stop)
            stop += decodes and self._has_slot(sequence, stop)
        shift = int(self._mtp is not None)
        has_logits = decodes and (self._mtp is not None or stop == len(sequence.tokens))
        gap = since == sequence.num_preemptions and done < chunk.start
        self._followed[sequence.id] = (done if gap else stop, sequence.num_preemptions)
        return GivenChunk(
            sequence,
            start,
            stop,
            stop - 1 if has_logits and not gap else stop,
            given=sequence.tokens[start + shift : stop + shift],
        )

    def _run(self, chunks: list[GivenChunk]) -> None:
        self._logits = self._runner.run(chunks)
        self._last, logits, row = {}, 0, 0
        for chunk in chunks:
            row += chunk.stop - chunk.start
            if chunk.num_logits:
                self._last[chunk.sequence.id] = LastRow(chunk.stop - 1, logits)
                if self._mtp is not None:
                    self._hidden_rows[chunk.sequence.id] = row - 1
                logits += chunk.num_logits

    def _extend(self, going: list[EngineSequence], found: dict[int, list[int]]) -> None:
        """One more row of each: the token just drafted."""
        if not going:
            self._last = {}
            return
        if self._mtp is not None:
            _copy(self._mtp.outputs, [self._hidden_rows[sequence.id] for sequence in going], self._mtp.inputs)
        positions = [self._last[sequence.id].position + 1 for sequence in going]
        self._run(
            [
                GivenChunk(sequence, place, place + 1, place, given=[found[sequence.id][-1]])
                for sequence, place in zip(going, positions, strict=True)
            ]
        )

    def _gather(self, mtp: MtpInputs, rows: list[range]) -> None:
        chosen = [row for part in rows for row in part]
        _copy(self._main.normed, chosen, mtp.inputs)

    @staticmethod
    def _has_slot(sequence: EngineSequence, position: int) -> bool:
        return len(sequence.blocks) * BLOCK_TOKENS > position


def _copy(source: Tensor, rows: list[int], into: Tensor) -> None:
    """Rows of one into the first of the other."""
    if into.device.type == "cpu":
        into.numpy()[: len(rows)] = source.detach().numpy()[rows]
    else:
        into[: len(rows)] = source[torch.tensor(rows, device=source.device)]


def draft_state(sequence: EngineSequence, depth: int) -> SamplingState:
    """How a draft is chosen: the most likely token, with the request's bias. Drafts drawn with the random number of the main model's token were
    accepted less often (docs/log.md)."""
    bias = sequence.request.sampling_state.bias
    return SamplingState(sampling=GREEDY, seed=0, counts=None, bias=bias, is_argmax=bias is None, num_sampled=depth)
