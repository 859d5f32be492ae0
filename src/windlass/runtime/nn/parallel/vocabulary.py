"""Embedding and output head, on one rank or vocabulary-parallel: each rank holds an interval of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windlass.runtime.kernels.cpu.links import starts_of
from windlass.runtime.kernels.ops.linear import embed, linear
from windlass.runtime.kernels.precision import widened
from windlass.runtime.kernels.program import program
from windlass.runtime.nn.parallel.shard import ModelShard
from windlass.runtime.nn.parallel.training import TrainingVocabulary
from windlass.runtime.parallel.autograd import AutogradGroup


class LocalVocabulary:
    def embedded(self, tokens: Tensor, table: Any, dtype: torch.dtype) -> Tensor:
        return embed(tokens, table, dtype)

    def logits(self, hidden: Tensor, head: Any, candidates: Tensor | None = None) -> Tensor:
        return widened(linear(hidden, head))


class GatheredVocabulary:
    """Embeddings are an all-reduce of rows that are zero on all ranks but one. Logits are gathered on rank 0."""

    def __init__(self, shard: ModelShard, count: int) -> None:
        self._group, self._intervals, self._count = shard.groups.tp, shard.vocabulary(count), count
        self._first, self._last = self._intervals[self._group.rank]

    def embedded(self, tokens: Tensor, table: Any, dtype: torch.dtype) -> Tensor:
        local = program.empty_on(tokens.shape, tokens.dtype, tokens.device)
        program.call(self._localize, tokens, local)
        rows = embed(local, table, dtype)
        program.call(self._summed, tokens, rows)
        return rows

    def _localize(self, tokens: Tensor, local: Tensor) -> None:
        """Tokens of other ranks are clamped into this interval, and masked later."""
        torch.sub(tokens, self._first, out=local).clamp_(0, self._last - self._first - 1)

    def _summed(self, tokens: Tensor, rows: Tensor) -> None:
        rows.masked_fill_(((tokens < self._first) | (tokens >= self._last))[:, None], 0)
        self._group.all_reduce(rows)

    def logits(self, hidden: Tensor, head: Any, candidates: Tensor | None = None) -> Tensor:
        """[0, vocabulary] on all ranks but the first. All logits, however few are needed."""
        part = widened(linear(hidden, head))
        rows = hidden.shape[0] if self._group.rank == 0 else 0
        whole = program.empty_on((rows, self._count), part.dtype, part.device)
        program.call(self._gathered, part, whole)
        return whole

    def _gathered(self, part: Tensor, whole: Tensor) -> None:
        into = [part.new_empty(part.shape[0], last - first) for first, last in self._intervals] if self._group.rank == 0 else []
        self._group.gather(part, into)
        if into:
            torch.cat(into, dim=1, out=whole)


class LinkedVocabulary:
    """The same over native links: a row is sent by the rank that holds it, and only the logits that a step needs are sent."""

    def __init__(self, shard: ModelShard, count: int) -> None:
        group: Any = shard.groups.tp
        intervals = shard.vocabulary(count)
        self._group, self._count, self._own = group, count, intervals[group.rank]
        self._starts = starts_of(intervals)

    def embedded(self, tokens: Tensor, table: Any, dtype: torch.dtype) -> Tensor:
        rows = embed(self._group.localize(tokens, self._own), table, dtype)
        self._group.exchange_rows(rows, tokens, self._starts)
        return rows

    def logits(self, hidden: Tensor, head: Any, candidates: Tensor | None = None) -> Tensor:
        """[0, vocabulary] on all ranks but the first. Logits that are not needed may be minus infinity."""
        part = widened(linear(hidden, head))
        rows = hidden.shape[0] if self._group.rank == 0 else 0
        whole = program.empty_on((rows, self._count), part.dtype, part.device)
        self._group.gather_logits(part, whole, self._starts, candidates)
        return whole


Vocabulary = LocalVocabulary | GatheredVocabulary | LinkedVocabulary | TrainingVocabulary


def vocabulary_of(shard: ModelShard, count: int) -> Vocabulary:
    group = shard.groups.tp
    if group.size == 1:
        return LocalVocabulary()
    if isinstance(group, AutogradGroup):
        return TrainingVocabulary(group, shard.vocabulary(count)[group.rank])
    return LinkedVocabulary(shard, count) if group.is_native else GatheredVocabulary(shard, count)
