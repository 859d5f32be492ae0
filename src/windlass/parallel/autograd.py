"""A group through which gradients pass: sums whose derivative is known, over torch.distributed's groups.

What every rank has alike and each takes its own part of (`entered`) has a gradient that is the sum of theirs; what is the sum of their
parts (`summed`) gives each the same gradient. Megatron's f and g (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.parallel.group import Count


class LearningGroup:
    is_native = False

    def __init__(self, handle: Any) -> None:
        """`handle`: a group of torch.distributed."""
        self.handle, self.rank, self.size = handle, dist.get_rank(handle), dist.get_world_size(handle)

    def entered(self, x: Tensor) -> Tensor:
        return Entered.apply(x, self.handle)

    def summed(self, x: Tensor) -> Tensor:
        return Summed.apply(x, self.handle)

    def largest(self, x: Tensor) -> Tensor:
        """Without a gradient."""
        found = x.detach().clone()
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.handle)
        return found

    def all_reduce(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.handle)

    def counts(self) -> dict[str, Count]:
        return {}

    def close(self) -> None:
        """Whoever made the processes ends their groups."""


class Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any) -> Tensor:
        ctx.handle = handle
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=ctx.handle)
        return whole, None


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any) -> Tensor:
        whole = x.contiguous().clone()
        dist.all_reduce(whole, group=handle)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
