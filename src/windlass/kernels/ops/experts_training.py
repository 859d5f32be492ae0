"""The routed feed-forward with gradients on a GPU: rows sorted by expert, and one product for all experts (torch._grouped_mm).

How many rows an expert has is known to the device alone and never asked for: there is room for every row and a little more. Each
expert's rows are rounded up to eight, since the kernel wants aligned groups of at least one; what fills them counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windlass.core.model import Activation
from windlass.kernels.ops.activate import _reference as activate
from windlass.kernels.torch_compile import chain

ALIGNED_ROWS = 8
"""Sixteen bytes of a column of 16-bit numbers, as TMA wants them."""


def usable(x: Tensor, *matrices: Any) -> bool:
    alike = all(isinstance(matrix, Tensor) and matrix.dtype == torch.bfloat16 for matrix in matrices)
    return x.is_cuda and x.dtype == torch.bfloat16 and alike


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    *,
    clamp: float | None = None,
    add: Tensor | None = None,
) -> Tensor:
    """As kernels.experts, without biases."""
    places = arranged(ids, down.shape[0])
    shares = torch.where(places.here, weights.flatten(), 0)
    of_slots = x.new_zeros(places.rows.shape[0], dtype=weights.dtype).scatter(0, places.slots, shares)
    inner = torch._grouped_mm(Spread.apply(x, places), gate_up.mT, offs=places.ends)
    weighed = _weighed(inner, of_slots, activation, clamp)
    said = Summed.apply(torch._grouped_mm(weighed, down.mT, offs=places.ends), places)
    return said if add is None else said + add


@dataclass(frozen=True)
class Places:
    """Where each choice of a row lies among all experts' rows, and back."""

    slots: Tensor
    """[rows * active]: of each choice; of choices that no expert here has, a slot that is nobody's."""
    rows: Tensor
    """[slots]: which row lies there; any, where none does."""
    ends: Tensor
    """int32 [experts]: behind each expert's last slot."""
    here: Tensor
    """[rows * active]: whether an expert here has it."""
    num_active: int


def arranged(ids: Tensor, num_experts: int) -> Places:
    chosen = ids.flatten().long()
    here = (chosen >= 0) & (chosen < num_experts)
    expert = torch.where(here, chosen, num_experts)
    ones = torch.ones_like(expert)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device).scatter_add_(0, expert, ones)
    room = (-(-counts[:-1] // ALIGNED_ROWS) * ALIGNED_ROWS).clamp(min=ALIGNED_ROWS)
    ends = room.cumsum(0)
    order = expert.to(torch.int32).argsort(stable=True)
    sorted_experts = expert[order]
    before = counts.cumsum(0) - counts
    num_slots = chosen.shape[0] + (num_experts + 1) * ALIGNED_ROWS
    begins = torch.cat((ends - room, ends.new_full((1,), num_slots)))
    place = begins[sorted_experts] + torch.arange(len(order), device=ids.device) - before[sorted_experts]
    slots = torch.empty_like(order).scatter_(0, order, place.clamp(max=num_slots - 1))
    choices = torch.arange(len(order), device=ids.device) // ids.shape[1]
    rows = torch.zeros(num_slots, dtype=torch.int64, device=ids.device).scatter_(0, slots, choices)
    return Places(slots, rows, ends.to(torch.int32), here, ids.shape[1])


@chain
def _weighed(inner: Tensor, shares: Tensor, activation: Activation, clamp: float | None) -> Tensor:
    """A row's share is applied here, so that what experts say need not be kept (as Megatron-Core's weighted SwiGLU does)."""
    return (activate(inner, activation, True, clamp) * shares[:, None]).to(inner.dtype)


@chain
def _sum(x: Tensor, slots: Tensor, here: Tensor, num_active: int) -> Tensor:
    """Of each row's choices: gathered and summed, which is deterministic and eight times faster than adding to rows in any order."""
    found = x[slots].float() if x.dtype.itemsize < 4 else x[slots]
    return torch.where(here[:, None], found, 0).unflatten(0, (-1, num_active)).sum(1).to(x.dtype)


class Spread(torch.autograd.Function):
    """Rows to the slots of their choices; going back, the sum of those."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return x[places.rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        places = ctx.places
        return _sum(gradient, places.slots, places.here, places.num_active), None


class Summed(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return _sum(x, places.slots, places.here, places.num_active)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.places.rows], None
