"""A differentiable group for tensor-parallel training, over torch.distributed.

`copy` is the identity forward and an all-reduce backward, `reduce` the other way round: Megatron's f and g (arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.runtime.parallel.group import Count


class AutogradGroup:
    is_native = False

    def __init__(self, handle: Any) -> None:
        """`handle`: a torch.distributed process group."""
        self.handle, self.rank, self.size = handle, dist.get_rank(handle), dist.get_world_size(handle)

    def copy(self, x: Tensor) -> Tensor:
        """For what all ranks have alike and each uses a part of: its gradient is summed over ranks."""
        return CopyToRanks.apply(x, self.handle)

    def reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        return ReduceFromRanks.apply(x, self.handle)

    def max(self, x: Tensor) -> Tensor:
        """The element-wise maximum over ranks, without a gradient."""
        result = x.detach().clone()
        dist.all_reduce(result, op=dist.ReduceOp.MAX, group=self.handle)
        return result

    def all_reduce(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.handle)

    def counts(self) -> dict[str, Count]:
        return {}

    def close(self) -> None:
        """The caller of init_process_group destroys the groups."""


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any) -> Tensor:
        ctx.handle = handle
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=ctx.handle)
        return whole, None


class ReduceFromRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Any) -> Tensor:
        whole = x.contiguous().clone()
        dist.all_reduce(whole, group=handle)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
