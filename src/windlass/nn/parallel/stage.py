"""Where a decoder's rows come from and where they go: tokens in and logits out, or to and from the ranks with the layers before and behind.

Whoever has the first layers and is the first of its tp group, the root, has the logits in the end: they come round from the last stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from windlass.kernels.program import program
from windlass.kernels.step import Step
from windlass.nn.parallel.collectives import recorded
from windlass.nn.parallel.shard import Shard

if TYPE_CHECKING:
    from windlass.nn.decoder import Decoder


class OnlyStage:
    def enter(self, decoder: Decoder, step: Step) -> Tensor:
        return decoder.embedded(step)

    def leave(self, decoder: Decoder, hidden: Tensor, step: Step) -> Tensor:
        return decoder.wanted_logits(hidden, step)


class OneOfStages:
    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._group: Any = recorded(shard.groups.pp)

    def enter(self, decoder: Decoder, step: Step) -> Tensor:
        if self._shard.is_first:
            return decoder.embedded(step)
        x = program.room((step.tokens.shape[0], decoder.spec.hidden_size), decoder.dtype, step.tokens.device)
        self._group.take_previous(x)
        return x

    def leave(self, decoder: Decoder, hidden: Tensor, step: Step) -> Tensor:
        if self._shard.is_last:
            return self._back_to_root(decoder.wanted_logits(hidden, step), step)
        self._group.send_next(hidden)
        return self._from_the_last(decoder, step)

    def _back_to_root(self, logits: Tensor, step: Step) -> Tensor:
        if self._shard.adds:
            with program.rows_counted_by(step.counts[2:3]):
                self._group.send_next_logits(logits, step.candidates)
        return logits[:0]

    def _from_the_last(self, decoder: Decoder, step: Step) -> Tensor:
        is_root = self._shard.is_first and self._shard.adds
        rows = step.logit_rows.shape[0] if is_root else 0
        logits = program.room((rows, decoder.spec.vocab_size), decoder.logit_dtype, step.tokens.device)
        if is_root:
            with program.rows_counted_by(step.counts[2:3]):
                self._group.take_previous_logits(logits, step.candidates)
        return logits


Stage = OnlyStage | OneOfStages


def stage_of(shard: Shard) -> Stage:
    return OnlyStage() if shard.groups.pp.size == 1 else OneOfStages(shard)
