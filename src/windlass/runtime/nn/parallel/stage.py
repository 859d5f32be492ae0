"""Pipeline stages: tokens in and logits out, or hidden states from the previous stage and to the next one.

The root (first stage, tp rank 0) gets the logits: the last stage sends them around to it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from windlass.core.model import ModelSpec
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.step import Step
from windlass.runtime.nn.parallel.collectives import recorded
from windlass.runtime.nn.parallel.shard import ModelShard


class StageDecoder(Protocol):
    """What a stage uses of its decoder."""

    spec: ModelSpec
    dtype: torch.dtype
    logit_dtype: torch.dtype

    def embedded(self, step: Step) -> Tensor: ...

    def step_logits(self, hidden: Tensor, step: Step) -> Tensor: ...


class SingleStage:
    def enter(self, decoder: StageDecoder, step: Step) -> Tensor:
        return decoder.embedded(step)

    def leave(self, decoder: StageDecoder, hidden: Tensor, step: Step) -> Tensor:
        return decoder.step_logits(hidden, step)

    def deliver(self, logits: Tensor, step: Step) -> Tensor:
        return logits


class PipelineStage:
    def __init__(self, shard: ModelShard) -> None:
        self._shard = shard
        self._group: Any = recorded(shard.groups.pp)

    def enter(self, decoder: StageDecoder, step: Step) -> Tensor:
        if self._shard.is_first:
            return decoder.embedded(step)
        x = program.empty_on((step.tokens.shape[0], decoder.spec.hidden_size), decoder.dtype, step.tokens.device)
        self._group.receive_previous(x)
        return x

    def leave(self, decoder: StageDecoder, hidden: Tensor, step: Step) -> Tensor:
        if self._shard.is_last:
            return self.deliver(decoder.step_logits(hidden, step), step)
        self._group.send_next(hidden)
        return self._receive_from_last(decoder, step)

    def deliver(self, logits: Tensor, step: Step) -> Tensor:
        """From the last stage to the root."""
        if self._shard.tp_index == 0:
            with program.rows_counted_by(step.counts[2:3]):
                self._group.send_next_logits(logits, step.candidates)
        return logits[:0]

    def _receive_from_last(self, decoder: StageDecoder, step: Step) -> Tensor:
        is_root = self._shard.is_first and self._shard.tp_index == 0
        rows = step.logit_rows.shape[0] if is_root else 0
        logits = program.empty_on((rows, decoder.spec.vocab_size), decoder.logit_dtype, step.tokens.device)
        if is_root:
            with program.rows_counted_by(step.counts[2:3]):
                self._group.receive_previous_logits(logits, step.candidates)
        return logits


Stage = SingleStage | PipelineStage


def stage_of(shard: ModelShard) -> Stage:
    return SingleStage() if shard.groups.pp.size == 1 else PipelineStage(shard)
