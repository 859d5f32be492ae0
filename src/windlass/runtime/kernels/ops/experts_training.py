"""The routed feed-forward with gradients on a GPU: rows sorted by expert, one grouped matmul for all experts (torch._grouped_mm).

The number of rows per expert stays on the device, without synchronization: buffers have room for all rows and padding. Each expert's rows are
padded to a multiple of eight, since the kernel needs aligned, non-empty groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windlass.core.model import Activation
from windlass.runtime.kernels.arguments import ExpertsArgs
from windlass.runtime.kernels.ops.activate import reference as activate
from windlass.runtime.kernels.packing.matrix import weight_data
from windlass.runtime.kernels.torch_compile import chain

ALIGNED_ROWS = 8
"""Sixteen bytes of a column of 16-bit elements, the alignment that TMA needs."""


def usable(x: Tensor, *matrices: Any) -> bool:
    alike = all(isinstance(matrix, Tensor) and matrix.dtype == torch.bfloat16 for matrix in matrices)
    return x.is_cuda and x.dtype == torch.bfloat16 and alike


def experts(args: ExpertsArgs) -> Tensor:
    """As ops.experts, without biases."""
    x, weights, down = args.x, args.weights, weight_data(args.down)
    slots = arranged(args.ids, down.shape[0])
    local_weights = torch.where(slots.is_local, weights.flatten(), 0)
    slot_weights = x.new_zeros(slots.rows.shape[0], dtype=weights.dtype).scatter(0, slots.slots, local_weights)
    inner = torch._grouped_mm(GatherToExperts.apply(x, slots), weight_data(args.gate_up).mT, offs=slots.ends)
    weighted = _activate_weighted(inner, slot_weights, args.activation, args.clamp)
    result = SumFromExperts.apply(torch._grouped_mm(weighted, down.mT, offs=slots.ends), slots)
    return result if args.add is None else result + args.add


@dataclass(frozen=True)
class ExpertSlots:
    """Maps (row, choice) pairs to slots sorted by expert, and back."""

    slots: Tensor
    """[rows * active]: the slot of each choice; choices of experts on other ranks share a padding slot."""
    rows: Tensor
    """[slots]: the row in each slot; arbitrary for padding."""
    ends: Tensor
    """int32 [experts]: the end of each expert's slots."""
    is_local: Tensor
    """[rows * active]: whether the expert is on this rank."""
    num_active: int


def arranged(ids: Tensor, num_experts: int) -> ExpertSlots:
    chosen = ids.flatten().long()
    is_local = (chosen >= 0) & (chosen < num_experts)
    expert = torch.where(is_local, chosen, num_experts)
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
    return ExpertSlots(slots, rows, ends.to(torch.int32), is_local, ids.shape[1])


@chain
def _activate_weighted(inner: Tensor, weights: Tensor, activation: Activation, clamp: float | None) -> Tensor:
    """Routing weights are applied here, so that the experts' outputs need not be kept for backward (as Megatron-Core's weighted SwiGLU)."""
    return (activate(inner, activation, True, clamp) * weights[:, None]).to(inner.dtype)


@chain
def _sum(x: Tensor, slots: Tensor, is_local: Tensor, num_active: int) -> Tensor:
    """Over each row's choices: a gather and a sum, which is deterministic and eight times faster than atomic adds."""
    gathered = x[slots].float() if x.dtype.itemsize < 4 else x[slots]
    return torch.where(is_local[:, None], gathered, 0).unflatten(0, (-1, num_active)).sum(1).to(x.dtype)


class GatherToExperts(torch.autograd.Function):
    """Forward: rows to the slots of their choices. Backward: the sum over slots."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: ExpertSlots) -> Tensor:
        ctx.slots = slots
        return x[slots.rows]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        slots = ctx.slots
        return _sum(gradient, slots.slots, slots.is_local, slots.num_active), None


class SumFromExperts(torch.autograd.Function):
    """The transpose of GatherToExperts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: ExpertSlots) -> Tensor:
        ctx.slots = slots
        return _sum(x, slots.slots, slots.is_local, slots.num_active)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[ctx.slots.rows], None
