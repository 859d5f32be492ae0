"""Tensor-parallel sums and vocabulary for training: differentiable, never recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windlass.core.place import Interval
from windlass.runtime.kernels.ops.linear import embed
from windlass.runtime.kernels.precision import widened
from windlass.runtime.parallel.autograd import AutogradGroup


class TrainingSum:
    """A half layer's input is copied to all ranks, and its output summed over them (see runtime/parallel/autograd.py)."""

    def __init__(self, group: AutogradGroup) -> None:
        self._group = group

    def enter(self, x: Tensor) -> Tensor:
        return self._group.copy(x)

    def fused_residual(self, residual: Tensor) -> Tensor | None:
        return None

    def total(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        whole = self._group.reduce(part)
        return whole if residual is None else whole + residual


class TrainingVocabulary:
    def __init__(self, group: AutogradGroup, own: Interval) -> None:
        self._group, (self._first, self._last) = group, own

    def embedded(self, tokens: Tensor, table: Any, dtype: torch.dtype) -> Tensor:
        here = (tokens >= self._first) & (tokens < self._last)
        rows = embed(torch.where(here, tokens - self._first, 0), table, dtype)
        return self._group.reduce(torch.where(here[:, None], rows, 0))

    def logits(self, hidden: Tensor, head: Any, candidates: Tensor | None = None) -> Tensor:
        """The logits of this rank's interval."""
        return widened(self._group.copy(hidden) @ head.t())

    def loss(self, hidden: Tensor, head: Any, targets: Tensor, z: float, ignored: int) -> tuple[Tensor, Tensor]:
        """As train.losses.head_loss: each rank has the logits of its interval, and the softmax denominator is summed over ranks."""
        logits = self.logits(hidden, head)
        largest = self._group.max(logits.amax(-1))
        denominator = self._group.reduce((logits - largest[:, None]).exp().sum(-1)).log() + largest
        here = (targets >= self._first) & (targets < self._last)
        found = logits.gather(1, torch.where(here, targets - self._first, 0)[:, None])[:, 0]
        own = self._group.reduce(torch.where(here, found, 0))
        learned = (targets != ignored).to(logits.dtype)
        entropy = ((denominator - own) * learned).sum()
        return entropy + z * (denominator.square() * learned).sum(), entropy.detach()
