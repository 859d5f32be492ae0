"""Expert load balancing: bias updates from token counts, plus auxiliary losses.

After each step a router's correction bias is updated by `rate * sign(mean load - load)`, with the loads of all ranks (arXiv 2408.15664).
The sequence-wise balance loss is that of arXiv 2412.19437 (2.1.2, equations 17 to 20), per sample; the z-loss that of arXiv 2202.08906 (3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core.model import Router, Scoring
from windlass.core.recipe.sections import LossSection
from windlass.runtime.kernels.precision import widened
from windlass.runtime.kernels.torch_compile import chain
from windlass.runtime.nn.moe import MixtureOfExperts


@dataclass
class BalanceContext:
    """Shared by all MoE layers: facts about the current step."""

    loss: LossSection
    length: int = 1
    """Tokens per sample."""
    num_samples: int = 1
    """Of the whole step, over all ranks: the losses are means over them."""
    owns_losses: bool = True
    """One of the ranks that see the same tokens adds the auxiliary losses."""
    scale: Tensor | float = 1.0
    """Factor on the objective before the backward pass; auxiliary losses need the same one."""


class ExpertBalancer:
    """Counts tokens and adds auxiliary losses of one MoE layer (nn.moe.Watch)."""

    def __init__(self, moe: MixtureOfExperts, context: BalanceContext) -> None:
        self.moe, self.context = moe, context
        device = next(moe.router.parameters()).device
        self.load = torch.zeros(moe.moe.num_experts, dtype=torch.int64, device=device)
        self.balance, self.z = (torch.zeros((), dtype=torch.float32, device=device) for _ in range(2))

    def __call__(self, logits: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        chosen = ids.long() + self.moe.first
        objective = self._losses(widened(logits), chosen)
        if not _is_recomputing():
            self.load.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten()))
        return shares if objective is None else AddAuxiliaryLoss.apply(shares, objective, self.context)

    def start_step(self) -> None:
        self.load.zero_()
        self.balance, self.z = torch.zeros_like(self.balance), torch.zeros_like(self.z)

    def _losses(self, logits: Tensor, chosen: Tensor) -> Tensor | None:
        context, weights = self.context, self.context.loss
        if not (weights.balance or weights.router_z):
            return None
        balance = sequence_balance(logits, chosen, self.moe.moe.router, context.length).sum() / context.num_samples
        z = logits.logsumexp(-1).square().sum() / (context.num_samples * context.length)
        if not _is_recomputing():
            self.balance, self.z = self.balance + balance.detach(), self.z + z.detach()
        return weights.balance * balance + weights.router_z * z if context.owns_losses else None


@chain
def sequence_balance(logits: Tensor, chosen: Tensor, router: Router, length: int) -> Tensor:
    """[samples]: sum over experts of (fraction of tokens * experts / top-k) * (mean probability): 1 with perfect balance."""
    num_experts, num_active = logits.shape[1], chosen.shape[1]
    scores = logits.sigmoid() if router.scoring is Scoring.SIGMOID else logits.softmax(-1)
    probability = (scores / scores.sum(-1, keepdim=True)).unflatten(0, (-1, length)).mean(1)
    fraction = torch.zeros_like(logits).scatter(1, chosen, 1.0).unflatten(0, (-1, length)).mean(1)
    return (fraction * (num_experts / num_active) * probability).sum(-1)


def _is_recomputing() -> bool:
    """Inside a backward pass (activation checkpointing): tokens were counted in the first forward."""
    return torch._C._current_graph_task_id() != -1


class AddAuxiliaryLoss(torch.autograd.Function):
    """Identity in the forward pass; in the backward pass the loss gets its gradient too."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor, context: BalanceContext) -> Tensor:
        ctx.like, ctx.context = (loss.dtype, loss.device), context
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return grad_outputs[0], torch.ones((), dtype=dtype, device=device) * ctx.context.scale, None


def attach_balancers(model: nn.Module, loss: LossSection) -> tuple[BalanceContext, list[ExpertBalancer]]:
    context, balancers = BalanceContext(loss), list[ExpertBalancer]()
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            balancer = ExpertBalancer(module, context)
            module.routing_hook = balancer
            balancers.append(balancer)
    return context, balancers


def update_biases(balancers: list[ExpertBalancer], loads: list[Tensor], rate: float) -> None:
    """`loads`: over all ranks."""
    for balancer, load in zip(balancers, loads, strict=True):
        correction = balancer.moe.correction
        if correction is not None and rate:
            wide = load.to(correction.dtype)
            correction += rate * (wide.mean() - wide).sign()
