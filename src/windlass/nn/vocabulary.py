"""Tokens to rows of the table and rows to logits, by one rank or by all that share the vocabulary, each with its own tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windlass.kernels import program
from windlass.kernels.linear import embed, linear
from windlass.kernels.precision import widened
from windlass.nn.shard import Shard


class WholeVocabulary:
    def embedded(self, tokens: Tensor, table: Any, dtype: torch.dtype) -> Tensor:
        return embed(tokens, table, dtype)

    def logits(self, hidden: Tensor, head: Any) -> Tensor:
        return widened(linear(hidden, head))


class SharedVocabulary:
    """A token's row comes from the rank that has it, by way of a sum in which all others are zero. Logits come together on rank 0."""

    def __init__(self, shard: Shard, count: int) -> None:
        self._group, self._intervals, self._count = shard.groups.tp, shard.vocabulary(count), count
        self._first, self._last = self._intervals[self._group.rank]

    def embedded(self, tokens: Tensor, table: Any, dtype: torch.dtype) -> Tensor:
        local = program.room(tokens.shape, tokens.dtype, tokens.device)
        program.call(self._localize, tokens, local)
        rows = embed(local, table, dtype)
        program.call(self._summed, tokens, rows)
        return rows

    def _localize(self, tokens: Tensor, local: Tensor) -> None:
        """Others' tokens are looked up too, as some of ours, and forgotten."""
        torch.sub(tokens, self._first, out=local).clamp_(0, self._last - self._first - 1)

    def _summed(self, tokens: Tensor, rows: Tensor) -> None:
        rows.masked_fill_(((tokens < self._first) | (tokens >= self._last))[:, None], 0)
        self._group.all_reduce(rows)

    def logits(self, hidden: Tensor, head: Any) -> Tensor:
        """[0, vocabulary] on all ranks but the first."""
        part = widened(linear(hidden, head))
        rows = hidden.shape[0] if self._group.rank == 0 else 0
        whole = program.room((rows, self._count), part.dtype, part.device)
        program.call(self._gathered, part, whole)
        return whole

    def _gathered(self, part: Tensor, whole: Tensor) -> None:
        into = [part.new_empty(part.shape[0], last - first) for first, last in self._intervals] if self._group.rank == 0 else []
        self._group.gather(part, into)
        if into:
            torch.cat(into, dim=1, out=whole)


Vocabulary = WholeVocabulary | SharedVocabulary


def vocabulary_of(shard: Shard, count: int) -> Vocabulary:
    return WholeVocabulary() if shard.groups.tp.size == 1 else SharedVocabulary(shard, count)
